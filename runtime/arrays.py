"""The index arrays of a step, all in one block of memory, so that few copies send them to a device.

    rows      tokens, positions, for each group of layers its slots, and how results are sampled:
              what every step changes
    tiling    tiles, out_rows, work: what changes when a sequence enters another segment
    tables    for each group of layers its block table

Rows and tiling are there twice: for decode calls with room for the largest of them, and for all
others with room for any. So what decode calls read stays where it is and as it is.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from xpuc.artifact import SAMPLING_WORDS
from xpuc.runtime.sequence import Sequence

Ints = npt.NDArray[np.int32]
Range = tuple[int, int]  # of a block of memory: first byte, end
_ALIGNMENT = 64  # bytes


class Leading:
    """An array of zeros and its leading parts, each made once.

    start  where it lies in its block, in bytes
    flat   its memory
    """

    def __init__(self, whole: Ints, start: int) -> None:
        self.all, self.start = whole, start
        self.flat = whole.reshape(-1).data
        self._views: dict[int, Ints] = {}

    @property
    def views(self) -> Iterable[Ints]:
        """The leading parts that were asked for."""
        return self._views.values()

    def keep(self, n: int) -> None:
        """Make those of 1 to `n` entries now."""
        for each in range(1, n + 1):
            self[each]

    def __getitem__(self, n: int) -> Ints:
        view = self._views.get(n)
        if view is None:
            assert n <= len(self.all), f"{n} entries, room for {len(self.all)}"
            view = self._views[n] = self.all[:n]
        return view

    def write(self, values: Iterable[int]) -> None:
        """Begin with these values."""
        numbers = array("i", values)
        self.flat[: len(numbers)] = numbers

    def end(self, n: int) -> int:
        """Where its first `n` entries end in its block, in bytes."""
        return self.start + n * self.all.strides[0]


class Rows:
    """Rows and tiling of one kind of calls.

    n_tiles     tiles of the tiling; n_items: work items
    n_work      work items, padding included
    is_changed  whether the tiling was written since `changed` was asked for
    """

    def __init__(self, arrays: Many[Leading]) -> None:
        self.tokens, self.positions, *slots, self.sampling = arrays[:-3]
        self.slots = tuple(slots)
        self.tiles, self.out_rows, self.work = arrays[-3:]
        self.n_tiles = self.n_items = self.n_work = 0
        self.is_changed = True

    def __iter__(self) -> Iterator[Leading]:
        rows = (self.tokens, self.positions, *self.slots, self.sampling)
        return iter((*rows, self.tiles, self.out_rows, self.work))

    @staticmethod
    def shapes(n: int, n_groups: int, n_tiles: int, n_work: int) -> list[tuple[int, ...]]:
        """Of its arrays, in order, for `n` rows."""
        rows = [(n,)] * (2 + n_groups) + [(n, SAMPLING_WORDS)]
        return [*rows, (n_tiles, 4), (n,), (n_work, 4)]

    def changed(self, *, tokens: bool) -> Iterator[Range]:
        """What the step at hand has changed; `tokens` are left out where these are known."""
        first = self.tokens if tokens else self.positions
        yield first.start, self.tiles.start
        if self.is_changed:
            self.is_changed = False
            yield self.tiles.start, self.work.end(self.n_work)


class Places:
    """Where the K/V of a group of layers lies: its block table."""

    def __init__(self, block_tokens: int, table: Leading) -> None:
        self.table = table
        self._block_tokens = block_tokens
        self._n_changed = 0  # leading rows of the table, since `changed` was asked for
        # Per row of the table: whose blocks stand there, since which epoch, and how many.
        self._written: list[tuple[Sequence | None, int, int]] = [(None, 0, 0)] * len(table.all)

    def slot(self, blocks: Many[int], position: int) -> int:
        """Where the K/V of a position of a sequence with these blocks is."""
        place, offset = divmod(position, self._block_tokens)
        return blocks[place] * self._block_tokens + offset

    def slots(self, row: int, positions: Ints) -> Ints:
        """Where those of the sequence in row `row` of the table are."""
        place, offset = np.divmod(positions, self._block_tokens)
        found: Ints = self.table.all[row, place] * self._block_tokens + offset
        return found

    def write_table(self, row: int, sequence: Sequence, blocks: Many[int]) -> None:
        """Within an epoch blocks are appended or given up, so what stands there already is kept."""
        owner, epoch, n = self._written[row]
        n_blocks = len(blocks)
        if owner is sequence and epoch == sequence.epoch:
            if n == n_blocks:
                return
        else:
            n = 0
        for place in range(n, n_blocks):
            self.table.all[row, place] = blocks[place]
        self._written[row] = (sequence, sequence.epoch, n_blocks)
        self._n_changed = max(self._n_changed, row + 1)

    def changed(self) -> Iterator[Range]:
        """The leading rows of the table that were written since this was asked for."""
        if self._n_changed:
            yield self.table.start, self.table.end(self._n_changed)
            self._n_changed = 0


def block_of(shapes: Many[tuple[int, ...]]) -> tuple[npt.NDArray[np.uint8], list[Leading]]:
    """Arrays of these shapes in a block of memory: its bytes, and they.

    Each starts where vectors may be read: compiled kernels do not check where an array starts.
    """
    starts, n_bytes = [], 0
    for shape in shapes:
        starts.append(n_bytes)
        n_bytes += -(-math.prod(shape) * 4 // _ALIGNMENT) * _ALIGNMENT
    raw = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    memory = raw[first : first + n_bytes]
    arrays = [
        Leading(memory[start : start + math.prod(shape) * 4].view(np.int32).reshape(shape), start)
        for shape, start in zip(shapes, starts, strict=True)
    ]
    return memory, arrays
