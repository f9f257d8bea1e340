"""The K/V pool's blocks: who owns each of them, and which hold a prefix that can be used again.

Plain Python: a block is a number, the tensors behind it live elsewhere. A block is owned by one or
more sequences or it is on the free list. One that was published keeps its link (what it holds)
when it is freed, and is found by `match` until it is allocated for something else:

    allocate -> owned -> publish (full) -> free -> free and cached -> share -> owned
                                                         |
                                                 evict (on_evict) -> owned by another

The free list is a queue: allocation takes from its front. Blocks without a link go back to the
front, so that cached ones live longer; those with one go to the back, tail of a sequence first, so
that the front is the least recently used and a prefix loses its end before its beginning.

A pool is of one group of layers, those that look back equally far: see kv_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from xpuc.runtime.prefix import Hasher, Link

OnEvict = Callable[[int, bytes], None]
NO_BLOCK = -1


class PoolFull(Exception):
    """More blocks were asked for than are free; the scheduler decides who yields."""


@dataclass(slots=True)
class PoolCounters:
    """Since the pool was made.

    evictions  cached blocks that were allocated for something else
    copies     blocks copied because a shared one was to be written
    """

    evictions: int = 0
    copies: int = 0


class BlockPool:
    """`n_blocks` blocks of `block_tokens` tokens, numbered from 0.

    At all times n_free + n_used == n_blocks; cached blocks that nobody owns count as free.

    seed      identity of the K/V, see prefix.Hasher
    on_evict  called with (block, digest) when the last block with that digest is about to be
              given to another: its K/V is intact during the call and may be overwritten after it;
              `link(block)` still tells what it holds. Must not raise, nor change the pool.
    """

    def __init__(
        self,
        n_blocks: int,
        block_tokens: int,
        *,
        seed: bytes = b"",
        on_evict: OnEvict | None = None,
    ) -> None:
        assert n_blocks > 0, n_blocks
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.hasher = Hasher(block_tokens, seed)
        self.on_evict = on_evict
        self.counters = PoolCounters()
        self._free = _FreeList(n_blocks)
        self._n_owners = [0] * n_blocks
        self._links: list[Link | None] = [None] * n_blocks
        # Equal blocks are kept side by side: block numbers of a sequence must not change.
        self._cached: dict[bytes, list[int]] = {}

    @property
    def n_free(self) -> int:
        return self._free.n

    @property
    def n_used(self) -> int:
        return self.n_blocks - self._free.n

    def n_owners(self, block: int) -> int:
        return self._n_owners[block]

    def link(self, block: int) -> Link | None:
        """What a published block holds."""
        return self._links[block]

    def cached(self) -> Iterator[tuple[int, Link]]:
        """One block of each published content, owned or not: what a store would keep at exit."""
        for blocks in self._cached.values():
            link = self._links[blocks[0]]
            assert link is not None
            yield blocks[0], link

    def allocate(self, n: int) -> list[int]:
        """`n` free blocks with one owner each; all of them or, with PoolFull, none."""
        if n > self._free.n:
            raise PoolFull(f"{n} blocks asked for, {self._free.n} of {self.n_blocks} are free")
        n_owners, links, blocks = self._n_owners, self._links, self._free.take(n)
        for block in blocks:
            if links[block] is not None:
                self._evict(block)
            n_owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks that are owned or cached."""
        for block in blocks:
            if self._n_owners[block] == 0:
                assert self._links[block] is not None, f"block {block} holds nothing to share"
                self._free.remove(block)
            self._n_owners[block] += 1

    def writable(self, block: int) -> int:
        """A block its owner may write in place of `block`: itself, unless others own it too.

        Then it is a new one, and the tensor side copies `block` to it before anything is written.
        PoolFull if there is none. A published block is full and never written again.
        """
        assert self._links[block] is None, f"block {block} is published, and is to be written"
        assert self._n_owners[block] > 0, f"block {block} is to be written, but nobody owns it"
        if self._n_owners[block] == 1:
            return block
        (copy,) = self.allocate(1)
        self._n_owners[block] -= 1
        self.counters.copies += 1
        return copy

    def free(self, blocks: Many[int]) -> None:
        """One owner less, tail first; those without any are free, and found while they last."""
        n_owners, links = self._n_owners, self._links
        unknown: list[int] = []
        cached: list[int] = []
        for block in blocks:
            n_left = n_owners[block] - 1
            assert n_left >= 0, f"block {block} is freed twice"
            n_owners[block] = n_left
            if not n_left:
                (unknown if links[block] is None else cached).append(block)
        if unknown:
            self._free.push_front(unknown)
        if cached:
            self._free.push_back(cached[::-1])

    def chain(self, tokens: Many[int], extra: bytes = b"") -> list[Link]:
        """Links of the full blocks of `tokens` that a request for them may reuse.

        The last token is always computed, for its result: at most len(tokens) - 1 are reused.
        """
        links: list[Link] = []
        self.hasher.extend(links, tokens, (len(tokens) - 1) // self.block_tokens, extra)
        return links

    def match(self, links: Many[Link]) -> list[int]:
        """Blocks of the longest cached prefix of a chain; `share` them before anything else.

        They hold block_tokens times as many tokens.
        """
        blocks = []
        for link in links:
            block = self.find(link)
            if block == NO_BLOCK:
                break
            blocks.append(block)
        return blocks

    def find(self, link: Link) -> int:
        """A cached block of this content, or NO_BLOCK."""
        found = self._cached.get(link.digest)
        if found is None or self._content(found[0]) != link.content:
            return NO_BLOCK
        return found[0]

    def n_cached(self, links: Many[Link], guess: int = 0) -> int:
        """How many leading links are cached, by digest, looked for from `guess` on.

        Quick where a guess is near, and right as long as prefixes lose their end first: good to
        compare sequences by. What a sequence gets is what `match` says.
        """
        n = min(guess, len(links))
        while n and links[n - 1].digest not in self._cached:
            n -= 1
        while n < len(links) and links[n].digest in self._cached:
            n += 1
        return n

    def publish(self, block: int, link: Link) -> None:
        """`block` holds the K/V of `link`, computed or read from the store: it can be found now.

        Another content with the same digest keeps it, and this block stays unknown.
        """
        assert self._n_owners[block] > 0, f"block {block} is published, but nobody owns it"
        assert self._links[block] is None, f"block {block} is published twice"
        others = self._cached.get(link.digest)
        if others is None:
            self._cached[link.digest] = [block]
        elif self._content(others[0]) == link.content:
            others.append(block)
        else:
            return
        self._links[block] = link

    def withdraw(self, block: int) -> None:
        """Never find this owned block again: what computed it has failed."""
        assert self._n_owners[block] > 0, f"block {block} is withdrawn, but nobody owns it"
        if self._links[block] is not None:
            self._forget(block)

    def forget(self, link: Link) -> None:
        """Never find this content again, whoever owns the blocks that hold it."""
        for block in list(self._cached.get(link.digest, ())):
            if self._content(block) == link.content:
                self._forget(block)

    def check(self) -> None:
        """Every block is on the free list or owned, never both; the index and the links agree."""
        free = list(self._free)
        assert len(set(free)) == len(free) == self._free.n, "a block is on the free list twice"
        owned = {block for block, n in enumerate(self._n_owners) if n > 0}
        assert not owned & set(free), f"blocks {sorted(owned & set(free))} are free and owned"
        assert len(free) + len(owned) == self.n_blocks, "a block is lost"
        found = sorted(block for blocks in self._cached.values() for block in blocks)
        linked = [block for block, link in enumerate(self._links) if link is not None]
        assert found == linked, "the index and the blocks disagree"
        for digest, blocks in self._cached.items():
            assert {self._content(each) for each in blocks} == {self._content(blocks[0])}
            assert all(self._links[each][0] == digest for each in blocks)  # type: ignore[index]

    def _content(self, block: int) -> bytes:
        link = self._links[block]
        assert link is not None, f"block {block} is in the index without a link"
        return link.content

    def _evict(self, block: int) -> None:
        link = self._links[block]
        assert link is not None
        if self.on_evict is not None and len(self._cached[link.digest]) == 1:
            self.on_evict(block, link.digest)
        self._forget(block)
        self.counters.evictions += 1

    def _forget(self, block: int) -> None:
        link = self._links[block]
        assert link is not None
        blocks = self._cached[link.digest]
        blocks.remove(block)
        if not blocks:
            del self._cached[link.digest]
        self._links[block] = None


class _FreeList:
    """A queue of block numbers below `n` that any of them leaves in O(1); all at first, in order.

    A ring through two lists, with one more entry that is the front's predecessor.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._ring = n
        self._next: list[int] = [*range(1, n + 1), 0]
        self._previous: list[int] = [n, *range(n)]

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._ring]
        while block != self._ring:
            yield block
            block = self._next[block]

    def push_front(self, blocks: Many[int]) -> None:
        """The first of them is the first to be taken."""
        self._insert(self._ring, blocks)

    def push_back(self, blocks: Many[int]) -> None:
        self._insert(self._previous[self._ring], blocks)

    def take(self, n: int) -> list[int]:
        """The first `n` leave, in order; there are as many."""
        followers, blocks = self._next, []
        block = followers[self._ring]
        for _ in range(n):
            blocks.append(block)
            block = followers[block]
        followers[self._ring], self._previous[block] = block, self._ring
        self.n -= n
        return blocks

    def remove(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.n -= 1

    def _insert(self, before: int, blocks: Many[int]) -> None:
        """Behind `before`, in order."""
        followers, previous = self._next, self._previous
        after = followers[before]
        for block in blocks:
            followers[before], previous[block] = block, before
            before = block
        followers[before], previous[after] = after, before
        self.n += len(blocks)
