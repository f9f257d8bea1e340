"""What one model call is given: the arrays of a step, filled in place, and what a model must offer.

Rows are tokens. The arrays (all int32) hold a step's facts at a fixed capacity; a step sees their
leading parts:

    tokens (n,)  positions (n,)   the row's token and its place
    tiles (t, 4)         (row_start, n_rows, first_work, n_work), rows of one sequence
    work (w, 4)          (row_start, n_rows, seq, segment), a tile's segments of context, ascending
    out_rows (m,)        the rows whose result is wanted

and for each group of layers

    slots (n,)           where the row's K/V is written
    block_table (s, b)   the blocks of each sequence of the step, in order of position; where no row
                         of the step sees any of a block, what stands there names none

A step in which every sequence brings one token is a `decode` (one row) or `cols` call, padded to
the next bucket; a padded row has token 0, position 0 and slot -1 and is in no tile. Drafts of a
token are rows after it, tiles of their own that share its sequence's blocks. Everything else is a
`prefill` call. Decoding creates no array: its views are made with the batch, and tiles, work and
out_rows are written only when a sequence enters another segment or brings other drafts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from xpuc.artifact import Tail
from xpuc.runtime.modes import Modes
from xpuc.runtime.scheduler import Span
from xpuc.runtime.sequence import Sequence

Ints = npt.NDArray[np.int32]
Kind = Literal["decode", "cols", "prefill"]
_ALIGNMENT = 64  # bytes
_Tile = tuple[int, int, int, int]  # row_start, n_rows, row of the block table, last position


class Sizes(Protocol):
    """The facts of a model that shape its batches."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that the layers of each group see (0: all); a group's K/V is in its own blocks."""
        ...

    @property
    def n_blocks(self) -> tuple[int, ...]:
        """Of each group."""
        ...

    @property
    def max_context(self) -> int: ...
    @property
    def max_chunk(self) -> int: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def segment_tokens(self) -> int: ...


class StepModel(Sizes, Protocol):
    """What the engine works on; runtime.model.Model is one."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def max_out_rows(self) -> int:
        """Most rows a prefill call gives results of."""
        ...

    @property
    def modes(self) -> Modes:
        """How it may be decoded."""
        ...

    def run(self, batch: Batch, *, tail: Tail) -> npt.NDArray[np.int32 | np.float32]:
        """One step, K/V written in place; a view that holds until the next run.

        greedy: int32 (m,), the likeliest token of each of `out_rows` (the lowest id on a tie; -1
        where a logit is not a number); logits: float32 (m, n_vocab).
        """
        ...

    def copy_block(self, group: int, source: int, destination: int) -> None:
        """Block `destination` of a group holds the K/V that `source` does, in every layer."""
        ...


class Batch:
    """The arrays of the step at hand; `fill` sets them, the model reads them."""

    kind: Kind
    tokens: Ints
    positions: Ints
    tiles: Ints
    work: Ints
    out_rows: Ints

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._buckets = tuple(sorted(sizes.buckets))
        self._max_bucket = self._buckets[-1] if self._buckets else 0
        n_rows = max(sizes.max_chunk, sizes.max_batch, self._max_bucket)
        n_tiles = sizes.max_batch + -(-n_rows // sizes.tile_rows)
        n_segments = -(-sizes.max_context // sizes.segment_tokens)
        n_columns = -(-sizes.max_context // sizes.block_tokens)
        n_decode = self._max_bucket
        self._tokens = _Leading(n_rows, keep=n_decode)
        self._positions = _Leading(n_rows, keep=n_decode)
        self._tiles = _Leading(n_tiles, 4, keep=n_decode)
        self._work = _Leading(n_tiles * n_segments, 4, keep=n_decode * n_segments)
        self._out_rows = _Leading(n_rows, keep=n_decode)
        self._count = np.arange(max(sizes.max_context, n_rows), dtype=np.int32)
        self._groups = [
            _Places(sizes.block_tokens, n_rows, (sizes.max_batch, n_columns), keep=n_decode)
            for _ in sizes.windows
        ]
        self._n_sequences = 0
        # Of each row of a decode call its sequence and segments, as tiles and work say them.
        self._segments: list[tuple[int, int]] = []

    @property
    def n_rows(self) -> int:
        """Rows of the call, padding included."""
        return len(self.tokens)

    @property
    def slots(self) -> tuple[Ints, ...]:
        """Of each group."""
        return tuple([group.slots[self.n_rows] for group in self._groups])

    @property
    def block_tables(self) -> tuple[Ints, ...]:
        """Of each group."""
        return tuple([group.table[self._n_sequences] for group in self._groups])

    @property
    def views(self) -> tuple[Ints, ...]:
        """The arrays of the step, as a call takes them. A view that comes again is the same one."""
        (slots, table), *further = zip(self.slots, self.block_tables, strict=True)
        return (
            self.tokens, self.positions, slots, self.tiles, self.work, table, self.out_rows,
            *(view for group in further for view in group),
        )  # fmt: skip

    def kept(self) -> Iterator[Ints]:
        """All views there are; those of decode calls from the beginning."""
        common = (self._tokens, self._positions, self._tiles, self._work, self._out_rows)
        for each in (*common, *(a for group in self._groups for a in (group.slots, group.table))):
            yield from each.views.values()

    def fill(self, spans: Many[Span], *, every_row: bool = False) -> None:
        """Describe a step. out_rows are the last rows of the spans that end their sequence and the
        rows of their drafts, in the order of `spans`, or all rows with `every_row`. A step in which
        no result is wanted names its last row, because a call without any would need kernels for
        zero rows. Only decode calls take drafts, as many as the largest bucket has rows for.
        """
        if len(spans) <= self._max_bucket and all(s.count == 1 and s.is_last for s in spans):
            self._fill_decode(spans)
        else:
            self._fill_prefill(spans, every_row)
        self._n_sequences = len(spans)

    def _fill_decode(self, spans: Many[Span]) -> None:
        tokens, positions = self._tokens.all, self._positions.all
        segments: list[tuple[int, int]] = []
        for seq, span in enumerate(spans):
            sequence, position = span.sequence, span.start
            self._write_tables(seq, sequence)
            for token in (sequence.tokens[position], *span.drafts):
                row = len(segments)
                tokens[row] = token
                positions[row] = position
                for group, blocks in zip(self._groups, sequence.blocks, strict=True):
                    group.write_slot(row, blocks, position)
                segments.append((seq, position // self._sizes.segment_tokens + 1))
                position += 1
        n = len(segments)
        n_rows = next(bucket for bucket in self._buckets if bucket >= n)
        for row in range(n, n_rows):
            tokens[row], positions[row] = 0, 0
            for group in self._groups:
                group.slots.all[row] = -1
        if segments != self._segments:
            tiles = [(row, 1, seq, self._last(last)) for row, (seq, last) in enumerate(segments)]
            self._write_work(tiles)
            self._out_rows.write(range(n))
            self._segments = segments
        self._view(n_rows, n, "decode" if n_rows == 1 else "cols")

    def _fill_prefill(self, spans: Many[Span], every_row: bool) -> None:
        tiles: list[_Tile] = []
        wanted: list[int] = []
        row = 0
        for seq, span in enumerate(spans):
            self._write_tables(seq, span.sequence)
            self._write_rows(row, seq, span)
            for first in range(0, span.count, self._sizes.tile_rows):
                n = min(self._sizes.tile_rows, span.count - first)
                tiles.append((row + first, n, seq, span.start + first + n - 1))
            row += span.count
            if span.is_last:
                wanted.append(row - 1)
        if every_row:
            wanted = list(range(row))
        wanted = wanted or [row - 1]
        self._write_work(balanced(tiles))
        self._out_rows.write(wanted)
        self._segments = []
        self._view(row, len(wanted), "prefill")

    def _view(self, n_rows: int, n_out: int, kind: Kind) -> None:
        self.kind = kind
        self.tokens = self._tokens[n_rows]
        self.positions = self._positions[n_rows]
        self.out_rows = self._out_rows[n_out]

    def _last(self, n_segments: int) -> int:
        return n_segments * self._sizes.segment_tokens - 1

    def _write_rows(self, row: int, seq: int, span: Span) -> None:
        rows = slice(row, row + span.count)
        positions = self._count[span.start : span.start + span.count]
        self._tokens.all[rows] = span.sequence.tokens[span.start : span.start + span.count]
        self._positions.all[rows] = positions
        for group in self._groups:
            group.write_slots(rows, seq, positions)

    def _write_tables(self, seq: int, sequence: Sequence) -> None:
        for group, blocks in zip(self._groups, sequence.blocks, strict=True):
            group.write_table(seq, sequence, blocks)

    def _write_work(self, tiles: list[_Tile]) -> None:
        entries: list[int] = []
        items: list[int] = []
        for row, n_rows, seq, last in tiles:
            n_segments = last // self._sizes.segment_tokens + 1
            entries += (row, n_rows, len(items) // 4, n_segments)
            for segment in range(n_segments):
                items += (row, n_rows, seq, segment)
        self.tiles = self._tiles.write(entries)
        self.work = self._work.write(items)


class _Places:
    """Where the K/V of a group of layers lies: its slots and its block table, of `shape`."""

    def __init__(
        self, block_tokens: int, n_rows: int, shape: tuple[int, int], *, keep: int
    ) -> None:
        self.slots = _Leading(n_rows, keep=keep)
        self.table = _Leading(*shape, keep=keep)
        self._block_tokens = block_tokens
        # Per row of the table: whose blocks stand there, since which epoch, and how many.
        self._written: list[tuple[Sequence | None, int, int]] = [(None, 0, 0)] * shape[0]

    def write_slot(self, row: int, blocks: Many[int], position: int) -> None:
        place, offset = divmod(position, self._block_tokens)
        self.slots.all[row] = blocks[place] * self._block_tokens + offset

    def write_slots(self, rows: slice, seq: int, positions: Ints) -> None:
        """Of rows of the sequence that stands in row `seq` of the table."""
        place, offset = np.divmod(positions, self._block_tokens)
        self.slots.all[rows] = self.table.all[seq, place] * self._block_tokens + offset

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


class _Leading:
    """An array of zeros and its leading parts: the first `keep` from the beginning, others when
    they are asked for, each made once."""

    def __init__(self, *shape: int, keep: int) -> None:
        # Compiled kernels read whole vectors and do not check where an array starts.
        raw = np.zeros(math.prod(shape) * 4 + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self.all: Ints = raw[start : start + math.prod(shape) * 4].view(np.int32).reshape(shape)
        self._flat = self.all.reshape(-1).data
        self.views: dict[int, Ints] = {n: self.all[:n] for n in range(1, keep + 1)}

    def __getitem__(self, n: int) -> Ints:
        view = self.views.get(n)
        if view is None:
            assert n <= len(self.all), f"{n} entries, room for {len(self.all)}"
            view = self.views[n] = self.all[:n]
        return view

    def write(self, values: Iterable[int]) -> Ints:
        """The leading part that holds these values and no others."""
        numbers = array("i", values)
        self._flat[: len(numbers)] = numbers
        return self[len(numbers) * len(self.all) // self.all.size]


def balanced(tiles: list[_Tile]) -> list[_Tile]:
    """The tiles in an order whose contiguous halves, and halves of halves, cost about the same.

    Threads take contiguous parts of the list, and a causal tile costs its rows times the context
    they see: without this, whoever gets the end of the prompt works longest.
    """
    if len(tiles) < 3:
        return tiles
    room = [-(-len(tiles) // 2), len(tiles) // 2]
    halves: tuple[list[_Tile], list[_Tile]] = ([], [])
    costs = [0, 0]
    for tile in sorted(tiles, key=_cost, reverse=True):
        side = 0 if costs[0] < costs[1] else 1
        if len(halves[side]) == room[side]:
            side = 1 - side
        halves[side].append(tile)
        costs[side] += _cost(tile)
    return balanced(halves[0]) + balanced(halves[1])


def _cost(tile: _Tile) -> int:
    return tile[1] * (tile[3] + 1)
