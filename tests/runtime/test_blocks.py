"""No block is lost, none is owned by two who did not share it, no hash points at other tokens."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xpuc.runtime import prefix
from xpuc.runtime.blocks import BlockPool, PoolFull
from xpuc.runtime.prefix import Hasher, Link

N_BLOCKS, SIZE = 12, 2


class Holding:
    """A sequence: its tokens, and the blocks it has for them."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks = tokens, blocks


class Pool(RuleBasedStateMachine):
    """A pool beside a model of it: who holds what, and which tokens stand in each block.

    `written[block]` is the whole text up to the block's end, as K/V hangs on all of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS, SIZE, seed=b"m", on_evict=self.saved)
        self.held: list[Holding] = []
        self.written: dict[int, tuple[int, ...]] = {}
        self.store: dict[bytes, tuple[int, ...]] = {}

    def saved(self, block: int, digest: bytes) -> None:
        assert self.pool.n_owners(block) == 0
        link = self.pool.link(block)
        assert link is not None
        assert link.digest == digest
        self.store[digest] = self.written[block]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def request(self, tokens: list[int]) -> None:
        links = self.pool.chain(tokens)
        assert len(links) == (len(tokens) - 1) // SIZE
        found = self.pool.match(links)
        assert self.pool.n_cached(links) == len(found)
        for place, block in enumerate(found):
            assert self.written[block] == tuple(tokens[: (place + 1) * SIZE])
        n_new = -(-len(tokens) // SIZE) - len(found)
        n_free = self.pool.n_free - sum(self.pool.n_owners(block) == 0 for block in found)
        if n_new > n_free:
            return
        self.pool.share(found)
        new = self.pool.allocate(n_new)
        self.held.append(Holding(tokens, found + new))
        self.fill(self.held[-1], len(found))

    def fill(self, holding: Holding, first: int) -> None:
        """Compute the blocks from `first` on, and publish those that are full."""
        links: list[Link] = []
        n_full = len(holding.tokens) // SIZE
        self.pool.hasher.extend(links, holding.tokens, n_full)
        for place in range(first, len(holding.blocks)):
            block = holding.blocks[place]
            assert self.pool.n_owners(block) == 1, "a shared block is written"
            self.written[block] = tuple(holding.tokens[: (place + 1) * SIZE])
            if place < n_full and self.pool.link(block) is None:
                self.pool.publish(block, links[place])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.held))
        self.pool.share(parent.blocks)
        self.held.append(Holding(list(parent.tokens), list(parent.blocks)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        holding = data.draw(st.sampled_from(self.held))
        place = len(holding.tokens) // SIZE
        is_new = place == len(holding.blocks)
        is_shared = not is_new and self.pool.n_owners(holding.blocks[place]) > 1
        if (is_new or is_shared) and not self.pool.n_free:
            with pytest.raises(PoolFull, match=f"0 of {N_BLOCKS} are free"):
                self.pool.allocate(1)
            return
        if is_new:
            holding.blocks += self.pool.allocate(1)
        else:
            before = holding.blocks[place]
            holding.blocks[place] = self.pool.writable(before)
            assert (holding.blocks[place] != before) == is_shared
        holding.tokens.append(token)
        self.fill(holding, place)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.booleans())
    def free(self, data: st.DataObject, fails: bool) -> None:
        holding = data.draw(st.sampled_from(self.held))
        self.held.remove(holding)
        if fails:
            for block in holding.blocks:
                self.pool.withdraw(block)
                assert self.pool.link(block) is None
        self.pool.free(holding.blocks)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check()
        assert self.pool.n_free + self.pool.n_used == N_BLOCKS
        for block in range(N_BLOCKS):
            owners = sum(block in each.blocks for each in self.held)
            assert self.pool.n_owners(block) == owners

    @invariant()
    def a_hash_names_what_was_written(self) -> None:
        for block in range(N_BLOCKS):
            link = self.pool.link(block)
            if link is not None:
                assert link.digest == digest_of(self.written[block])
        for digest, tokens in self.store.items():
            assert digest == digest_of(tokens)
        assert len(dict(self.pool.cached())) == len({link for _, link in self.pool.cached()})


def digest_of(tokens: tuple[int, ...]) -> bytes:
    links: list[Link] = []
    Hasher(SIZE, b"m").extend(links, tokens, len(tokens) // SIZE)
    return links[-1].digest


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_the_seeds_story_of_four_requests() -> None:
    """The golden lines of BlockPool: hits, recomputed tokens, blocks and the one eviction."""
    evicted: list[int] = []
    pool = BlockPool(8, 4, on_evict=lambda block, _: evicted.append(block))

    def allocate(tokens: list[int]) -> tuple[int, list[int], int]:
        found = pool.match(pool.chain(tokens))
        pool.share(found)
        blocks = found + pool.allocate(-(-len(tokens) // 4) - len(found))
        links: list[Link] = []
        pool.hasher.extend(links, tokens, len(tokens) // 4)
        for block, link in list(zip(blocks, links, strict=False))[len(found) :]:
            pool.publish(block, link)
        return 4 * len(found), blocks, pool.n_free

    def tokens(shared: int, own: int, seed: int) -> list[int]:
        return [100 + i if i < shared else seed + i for i in range(shared + own)]

    first = allocate(tokens(8, 5, 500))
    assert first == (0, [0, 1, 2, 3], 4)
    pool.free(first[1])
    assert allocate(tokens(8, 3, 900)) == (8, [0, 1, 3], 5)
    assert allocate(tokens(8, 0, 0)) == (4, [0, 4], 4)
    assert evicted == []
    assert allocate(tokens(0, 15, 300)) == (0, [5, 6, 7, 2], 0)
    assert evicted == [2]
    assert pool.counters.evictions == 1
    pool.check()


def test_digests_are_those_of_the_documented_bytes() -> None:
    links: list[Link] = []
    Hasher(2, b"model").extend(links, [1, -1, 3, 4, 5], 2, b"salt")
    root = xxhash.xxh3_128_digest(b"model")
    first = xxhash.xxh3_128_digest(root + struct.pack("<2i", 1, -1) + b"salt")
    second = xxhash.xxh3_128_digest(first + struct.pack("<2i", 3, 4) + b"salt")
    assert [link.digest for link in links] == [first, second]


@pytest.mark.parametrize("other", [{"seed": b"other"}, {"salt": b"other"}])
def test_other_models_and_other_salts_share_nothing(other: dict[str, bytes]) -> None:
    pool = BlockPool(4, 2, seed=b"model")
    (block,) = pool.allocate(1)
    pool.publish(block, pool.chain([1, 2, 3])[0])
    assert pool.match(pool.chain([1, 2, 3])) == [block]
    links: list[Link] = []
    hasher = Hasher(2, other.get("seed", b"model"))
    hasher.extend(links, [1, 2, 3], 1, other.get("salt", b""))
    assert pool.match(links) == []


def test_tokens_are_compared_on_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "xxh3_128_digest", lambda data: b"the same for all")
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], pool.chain([1, 2, 0])[0])
    pool.publish(blocks[1], pool.chain([3, 4, 0])[0])
    assert pool.match(pool.chain([1, 2, 0])) == [blocks[0]]
    assert pool.match(pool.chain([3, 4, 0])) == [], "the second one had to stay unknown"
    assert pool.link(blocks[1]) is None
    pool.check()


def published(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a sequence of its own for `tokens`, with the full ones published."""
    links: list[Link] = []
    pool.hasher.extend(links, tokens, len(tokens) // pool.block_tokens)
    blocks = pool.allocate(-(-len(tokens) // pool.block_tokens))
    for block, link in zip(blocks, links, strict=False):
        pool.publish(block, link)
    return blocks


def test_the_least_recently_used_goes_first_and_a_prefix_from_its_end() -> None:
    pool = BlockPool(6, 2)
    one, two = published(pool, [1, 2, 3, 4, 5]), published(pool, [6, 7, 8, 9])
    pool.free(one)
    pool.free(two)
    # The one without a hash, the one never used, then both prefixes in the order they were freed.
    assert pool.allocate(6) == [one[2], 5, one[1], one[0], two[1], two[0]]
    assert pool.counters.evictions == 4


def test_a_hit_saves_a_free_block_from_eviction() -> None:
    pool = BlockPool(3, 2)
    blocks = published(pool, [1, 2, 3, 4])
    pool.free(blocks)
    found = pool.match(pool.chain([1, 2, 9]))
    assert found == blocks[:1]
    pool.share(found)
    assert pool.n_free == 2
    pool.allocate(2)
    assert pool.match(pool.chain([1, 2, 3, 4, 5])) == found


@pytest.mark.parametrize("guess", [0, 1, 2, 3, 9])
def test_cached_blocks_are_counted_from_any_guess(guess: int) -> None:
    pool = BlockPool(5, 2)
    pool.free(published(pool, [1, 2, 3, 4, 5, 6]))
    links = pool.chain([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.n_cached(links, guess) == 3
    pool.allocate(3)  # the two never used, and the end of the prefix
    assert pool.n_cached(links, guess) == 2


def test_only_the_last_copy_is_saved() -> None:
    evicted: list[int] = []
    pool = BlockPool(2, 2, on_evict=lambda block, _: evicted.append(block))
    one, two = published(pool, [1, 2]), published(pool, [1, 2])
    pool.free(one)
    pool.free(two)
    pool.allocate(1)
    assert evicted == []
    assert pool.match(pool.chain([1, 2, 3])) == two
    pool.allocate(1)
    assert evicted == two


def test_a_freed_block_is_reused_before_an_untouched_one() -> None:
    pool = BlockPool(8, 4)
    first = pool.allocate(3)
    pool.free(first)
    assert pool.allocate(3) == first


def test_freeing_twice_is_our_mistake() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="holds nothing to share"):
        pool.share(blocks)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2, 4)
    pool._free.take(1)
    with pytest.raises(AssertionError, match="lost"):
        pool.check()
