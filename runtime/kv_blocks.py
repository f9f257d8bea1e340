"""Which blocks of K/V a sequence has: found, taken, written, shared, given back.

Layers that look back equally far are a group, with a BlockPool of its own: the same place of a
sequence is one block in each group. Layers without a window keep every place. Those with one keep
what a row can still see and room for the rows of a step, at most a ring of blocks: the places
before are given back while the sequence goes on, and hold -1.

    place           0    1    2    3    4    5    6
    group 0        b0   b1   b2   b3   b4   b5   b6      all tokens
    group 1        -1   -1   -1   c0   c1   c2   c3      a window of two blocks

A prefix can be used again up to a block if group 0 has all places before it and group 1 those that
the next row sees, each in its pool or in the block store. What is given back can be found until it
is allocated for something else, like all that is freed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass

from xpuc.runtime.blocks import NO_BLOCK, BlockPool
from xpuc.runtime.plan import Copy
from xpuc.runtime.prefix import Link, PrefixSource
from xpuc.runtime.sequence import Sequence


@dataclass(slots=True)
class ReuseCounters:
    """Since the engine was made.

    queries       prefixes looked up for a sequence about to run
    query_tokens  tokens of those sequences
    hit_tokens    how many of them were found in the pools
    store_tokens  how many more the block store filled in
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    store_tokens: int = 0


def ring_blocks(window: int, max_chunk: int, block_tokens: int) -> int:
    """Blocks for what a row of a window sees before a step of `max_chunk` rows, and for these.

    They lie in one block more where the first of them is the last of its block.
    """
    return -(-(window + max_chunk - 2) // block_tokens) + 1


class Group:
    """The blocks of the layers of one window.

    window  tokens that a row sees, itself included; 0: all
    most    blocks that a sequence has at most
    """

    def __init__(self, pool: BlockPool, window: int, max_chunk: int) -> None:
        self.pool, self.window, self.most = pool, window, pool.n_blocks
        self._size, self._seen = pool.block_tokens, window or sys.maxsize
        if window:
            ring = ring_blocks(window, max_chunk, self._size)
            self.most = min(ring, pool.n_blocks)
            self._holds_any = ring <= pool.n_blocks
        else:
            self._holds_any = False

    @property
    def max_tokens(self) -> int:
        """What a sequence may grow to."""
        return sys.maxsize if self._holds_any else self.pool.n_blocks * self._size

    def first(self, n_computed: int) -> int:
        """The first place that a row at position `n_computed` sees."""
        n_passed = n_computed - self._seen + 1
        return n_passed // self._size if n_passed > 0 else 0

    def passed(self, n_computed: int) -> int:
        """The position from which on rows do not see the first place of `n_computed`."""
        return (self.first(n_computed) + 1) * self._size + self._seen - 1

    def end(self, n_computed: int, n_tokens: int) -> int:
        """The place after the last one to have for `n_tokens` tokens."""
        places, most = -(-n_tokens // self._size), self.first(n_computed) + self.most
        return places if places < most else most


@dataclass(slots=True)
class _Found:
    """A prefix of `n` full blocks that needs no computing.

    `blocks` has one list a group: the pool's block of each place from `Group.first` of its end to
    `n`, or NO_BLOCK where only the store has it.
    """

    n: int
    blocks: list[list[int]]


class KvBlocks:
    """The groups' pools, in the order of `windows`, and all that sequences do with them.

    max_chunk  most rows a sequence has in a step
    reuse      whether prefixes are published and found
    store      asked for what the pools no longer have; the pools' on_evict feeds it
    """

    def __init__(
        self,
        pools: Many[BlockPool],
        windows: Many[int] = (0,),
        *,
        max_chunk: int = 1,
        reuse: bool = True,
        store: PrefixSource | None = None,
    ) -> None:
        self.groups = tuple(
            Group(pool, window, max_chunk) for pool, window in zip(pools, windows, strict=True)
        )
        self.block_tokens = pools[0].block_tokens
        self.reuse = reuse
        self.store = store
        self.counters = ReuseCounters()
        self._hasher = pools[0].hasher
        self._windowed = [(g, group) for g, group in enumerate(self.groups) if group.window]

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the pools hold."""
        return min(group.max_tokens for group in self.groups)

    @property
    def n_free(self) -> int:
        """Free blocks of the group that has the fewest."""
        return min([group.pool.n_free for group in self.groups])

    @property
    def n_used(self) -> int:
        """Blocks with an owner, of all groups."""
        return sum(group.pool.n_used for group in self.groups)

    def check(self) -> None:
        """No block of any pool is lost or owned by two who do not share it."""
        for group in self.groups:
            group.pool.check()

    def start(self, sequence: Sequence, n_rows: int, headroom: int = 0) -> bool:
        """Blocks for a sequence that begins to run and computes at most `n_rows` rows at first;
        False, and nothing is changed, if too few are free.

        It gets them at once, so that two that start together never count on the same ones, and
        only if `headroom` more are free for the tokens that follow.
        """
        # A block of the store that is not whole is forgotten: then a shorter prefix, or none of it.
        for store in (self.store, self.store, None):
            found = self._match(self.reusable(sequence), store)
            n_tokens = min(len(sequence.tokens), found.n * self.block_tokens + n_rows)
            if not self._fits(found, n_tokens, headroom):
                return False
            if self._take(sequence, found, n_tokens):
                break
            self.release(sequence)
        return True

    def borrow(self, sequence: Sequence, n_tokens: int) -> bool:
        """Blocks for a sequence that computes all its tokens and no scheduler knows; see `grow`."""
        sequence.blocks = [[] for _ in self.groups]
        return self.grow(sequence, n_tokens, [])

    def grow(self, sequence: Sequence, n_tokens: int, copies: list[Copy]) -> bool:
        """Blocks of its own for a sequence's tokens from n_computed to `n_tokens`, those of its
        next step at least; False, and nothing is changed, if too few are free.

        A block that is shared and about to be written is replaced, and the copy that this takes is
        added to `copies`.
        """
        n_computed = sequence.n_computed
        shared = self._shared(sequence) if sequence.may_share else ()
        missing = []
        for g, group in enumerate(self.groups):
            n = group.end(n_computed, n_tokens) - len(sequence.blocks[g])
            n = n if n > 0 else 0
            if n + (g in shared) > group.pool.n_free:
                return False
            missing.append(n)
        if shared:
            self._unshare(sequence, shared, copies)
        for g, n in enumerate(missing):
            if n:
                sequence.blocks[g] += self.groups[g].pool.allocate(n)
        sequence.may_share = False
        sequence.n_room = min(map(len, sequence.blocks)) * self.block_tokens
        return True

    def _shared(self, sequence: Sequence) -> list[int]:
        """The groups in which the block that it writes next is another's as well."""
        place = sequence.n_computed // self.block_tokens
        return [
            g
            for g, blocks in enumerate(sequence.blocks)
            if place < len(blocks) and self.groups[g].pool.n_owners(blocks[place]) > 1
        ]

    def _unshare(self, sequence: Sequence, shared: Many[int], copies: list[Copy]) -> None:
        """Give it blocks of its own in place of these."""
        place = sequence.n_computed // self.block_tokens
        for g in shared:
            blocks = sequence.blocks[g]
            source, blocks[place] = blocks[place], self.groups[g].pool.writable(blocks[place])
            copies.append(Copy(g, source, blocks[place]))
        sequence.epoch += 1

    def advance(self, sequence: Sequence, n_computed: int) -> None:
        """A step has computed so many tokens: their full blocks can be found, and those that no
        later row sees are given back. Below `sequence.n_due` only the count changes."""
        n = n_computed // self.block_tokens
        if n > sequence.n_published and self.reuse:
            self._extend(sequence, n)
            for g, group in enumerate(self.groups):
                blocks = sequence.blocks[g]
                for place in range(sequence.n_published, n):
                    group.pool.publish(blocks[place], sequence.links[place])
            sequence.n_published = n
        self.slide(sequence, n_computed)
        sequence.n_due = self._due(sequence)

    def slide(self, sequence: Sequence, n_computed: int) -> None:
        """`advance` of a sequence that is not to be found by others."""
        for g, group in self._windowed:
            first, end = group.first(sequence.n_computed), group.first(n_computed)
            if first < end:
                blocks = sequence.blocks[g]
                group.pool.free(blocks[first:end])
                blocks[first:end] = [NO_BLOCK] * (end - first)
        sequence.n_computed = n_computed

    def truncate(self, sequence: Sequence) -> None:
        """Give back the blocks beyond what it has computed, which hold nothing that is to stay."""
        end = -(-sequence.n_computed // self.block_tokens)
        if all(len(blocks) <= end for blocks in sequence.blocks):
            return
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.pool.free(blocks[end:])
            del blocks[end:]
        sequence.epoch += 1
        sequence.n_room = min(map(len, sequence.blocks)) * self.block_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares the parent's blocks; whichever writes to the last one first copies it."""
        n_computed = parent.n_computed
        end = -(-n_computed // self.block_tokens)
        for group, blocks in zip(self.groups, parent.blocks, strict=True):
            child.blocks.append(blocks[:end])
            group.pool.share(blocks[group.first(n_computed) : end])
        child.n_computed = n_computed
        child.n_found = child.n_published = parent.n_published
        child.n_room = end * self.block_tokens
        child.n_due = parent.n_due
        child.may_share = parent.may_share = True

    def release(self, sequence: Sequence) -> None:
        """It owns nothing any more; what it published can be found while it lasts."""
        for group, blocks in zip(self.groups, sequence.blocks, strict=False):
            group.pool.free(blocks[group.first(sequence.n_computed) :])
        sequence.blocks = []
        sequence.epoch += 1
        sequence.n_computed = sequence.n_found = sequence.n_published = sequence.n_room = 0
        sequence.n_due = 0
        sequence.may_share = False

    def withdraw(self, sequence: Sequence) -> None:
        """Never find again what this sequence has computed."""
        for group, blocks in zip(self.groups, sequence.blocks, strict=False):
            for place in range(sequence.n_found, sequence.n_published):
                if blocks[place] == NO_BLOCK:
                    group.pool.forget(sequence.links[place])
                else:
                    group.pool.withdraw(blocks[place])

    def reusable(self, sequence: Sequence) -> list[Link]:
        """The links of a sequence that runs from its beginning: its last token is computed."""
        if not self.reuse:
            return []
        n = (len(sequence.tokens) - 1) // self.block_tokens
        self._extend(sequence, n)
        return sequence.links[:n]

    def n_cached(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are in the first group's pool."""
        links = self.reusable(sequence)
        sequence.n_cached = self.groups[0].pool.n_cached(links, sequence.n_cached)
        return sequence.n_cached * self.block_tokens

    def _due(self, sequence: Sequence) -> int:
        """Computed tokens with which another block is full or is seen no more."""
        due = (sequence.n_published + 1) * self.block_tokens if self.reuse else sys.maxsize
        for _, group in self._windowed:
            due = min(due, group.passed(sequence.n_computed))
        return due

    def _extend(self, sequence: Sequence, n_blocks: int) -> None:
        if len(sequence.links) < n_blocks:
            salt = sequence.request.salt
            self._hasher.extend(sequence.links, sequence.tokens, n_blocks, salt)

    def _match(self, links: Many[Link], store: PrefixSource | None) -> _Found:
        """The longest prefix that every group has, in its pool or in `store`."""
        n = len(links)
        for g, group in enumerate(self.groups):
            if not group.window:
                n_pool = len(group.pool.match(links[:n]))
                n = n_pool + (store.n_leading(g, links[n_pool:n]) if store is not None else 0)
        while n and (gap := self._gap(links, n, store)) is not None:
            n = gap
        blocks = []
        for group in self.groups:
            seen = links[group.first(n * self.block_tokens) : n]
            blocks.append([group.pool.find(link) for link in seen])
        return _Found(n, blocks)

    def _gap(self, links: Many[Link], n: int, store: PrefixSource | None) -> int | None:
        """A place that a row after `n` blocks sees in a windowed group, and nobody has.

        No prefix that ends between it and `n` can be used either: its next row sees it too. Of each
        group the last is looked for, and the first of these is the answer.
        """
        gaps = []
        for g, group in self._windowed:
            for place in range(n - 1, group.first(n * self.block_tokens) - 1, -1):
                link = links[place]
                if group.pool.find(link) == NO_BLOCK and not (
                    store is not None and store.n_leading(g, [link])
                ):
                    gaps.append(place)
                    break
        return min(gaps, default=None)

    def _fits(self, found: _Found, n_tokens: int, headroom: int) -> bool:
        """Whether free blocks cover what is not found, or found and owned by nobody.

        The headroom is for the first tokens that follow: without it a sequence would have to yield
        at once. Only one that has all it can have in a group does without.
        """
        n_computed = found.n * self.block_tokens
        for group, blocks in zip(self.groups, found.blocks, strict=True):
            pool = group.pool
            places = -(-n_tokens // self.block_tokens) - group.first(n_computed)
            n_owned = sum(block != NO_BLOCK and pool.n_owners(block) > 0 for block in blocks)
            if min(places + headroom, group.most) - n_owned > pool.n_free:
                return False
        return True

    def _take(self, sequence: Sequence, found: _Found, n_tokens: int) -> bool:
        """Give a sequence what was found, and new blocks; False if the store did not keep word."""
        size = self.block_tokens
        sequence.n_computed = found.n * size
        for group, cached in zip(self.groups, found.blocks, strict=True):
            pool, first = group.pool, group.first(sequence.n_computed)
            shared = [block for block in cached if block != NO_BLOCK]
            pool.share(shared)
            end = group.end(sequence.n_computed, n_tokens)
            new = iter(pool.allocate(end - first - len(shared)))
            blocks = [block if block != NO_BLOCK else next(new) for block in cached]
            sequence.blocks.append([NO_BLOCK] * first + blocks + list(new))
        read: set[int] = set()
        for g, cached in enumerate(found.blocks):
            start = found.n - len(cached)
            places = [start + i for i, block in enumerate(cached) if block == NO_BLOCK]
            if places and not self._read(g, sequence, places):
                return False
            read.update(places)
        sequence.n_found = sequence.n_published = found.n
        sequence.n_due = self._due(sequence)
        sequence.n_room = min(map(len, sequence.blocks)) * size
        counters = self.counters
        counters.queries += 1
        counters.query_tokens += len(sequence.tokens)
        counters.hit_tokens += (found.n - len(read)) * size
        counters.store_tokens += len(read) * size
        return True

    def _read(self, g: int, sequence: Sequence, places: Many[int]) -> bool:
        """Fill blocks of a group from the store; those that were whole can be found."""
        assert self.store is not None
        blocks = [sequence.blocks[g][place] for place in places]
        links = [sequence.links[place] for place in places]
        n = self.store.fill(g, blocks, links)
        for block, link in zip(blocks[:n], links, strict=False):
            self.groups[g].pool.publish(block, link)
        return n == len(places)
