"""The K/V pool's blocks: which are free, and how many sequences hold each of the others.

Plain Python: a block is a number, the tensors behind it live elsewhere. `allocate` and `free` are
all a sequence of its own needs; `share` adds an owner to blocks that hold a common prefix, and a
block returns to the free list when its last owner frees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PoolFull(Exception):
    """More blocks were asked for than are free; the scheduler decides who yields."""


class BlockPool:
    """`n_blocks` blocks numbered from 0. At all times n_free + n_used == n_blocks."""

    def __init__(self, n_blocks: int) -> None:
        assert n_blocks > 0, n_blocks
        self.n_blocks = n_blocks
        self._free = deque(range(n_blocks))
        self._n_owners = [0] * n_blocks

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self._free)

    def n_owners(self, block: int) -> int:
        return self._n_owners[block]

    def allocate(self, n: int) -> list[int]:
        """`n` free blocks with one owner each; all of them or, with PoolFull, none."""
        if n > len(self._free):
            raise PoolFull(f"{n} blocks asked for, {len(self._free)} of {self.n_blocks} are free")
        blocks = [self._free.popleft() for _ in range(n)]
        for block in blocks:
            self._n_owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks that have an owner already."""
        for block in blocks:
            assert self._n_owners[block] > 0, f"block {block} is shared, but nobody holds it"
            self._n_owners[block] += 1

    def free(self, blocks: list[int]) -> None:
        """One owner less, tail first: what a later request reuses last is the common prefix."""
        for block in reversed(blocks):
            assert self._n_owners[block] > 0, f"block {block} is freed twice"
            self._n_owners[block] -= 1
            if self._n_owners[block] == 0:
                self._free.appendleft(block)

    def check(self) -> None:
        """Every block is on the free list or owned, never both and never twice."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        owned = {block for block, n in enumerate(self._n_owners) if n > 0}
        assert not free & owned, f"blocks {sorted(free & owned)} are free and owned"
        assert len(free) + len(owned) == self.n_blocks, "a block is lost"
