"""What one model call is given: the arrays of a step, filled in place, and what a model must offer.

Rows are tokens. The arrays (all int32) hold a step's facts at a fixed capacity; a step sees their
leading parts:

    tokens (n,)  positions (n,)   the row's token and its place
    tiles (t, 4)         (row_start, n_rows, first_work, n_work), rows of one sequence
    work (w, 4)          (row_start, n_rows, seq, segment), a tile's segments of context, ascending
    out_rows (m,)        the rows whose result is wanted

and where the step samples

    sampling (m, 16)     how a token of each row of the result is chosen

and for each group of layers

    slots (n,)           where the row's K/V is written
    block_table (s, b)   the blocks of each sequence of the step, in order of position; where no row
                         of the step sees any of a block, what stands there names none

A step in which every sequence brings one token is a `decode` (one row) or `cols` call, padded to
the next bucket; a padded row has token 0, position 0 and slot -1 and is in no tile. Drafts of a
token are rows after it, tiles of their own that share its sequence's blocks. Everything else is a
`prefill` call. Decoding creates no array: its views are made with the batch, and tiles, work and
out_rows are written only when a sequence enters another segment or brings other drafts.

Where a device replays decode calls, all their arrays are padded: one tile, row of block_table and
out_row for each row, and a power of two of work items. Tiles and items of n_rows 0 are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from xpuc.artifact import Sampling, Tail
from xpuc.runtime.arrays import Ints, Leading, Places, Range, Rows, block_of
from xpuc.runtime.modes import Modes
from xpuc.runtime.scheduler import Span
from xpuc.runtime.sequence import Sequence

Kind = Literal["decode", "cols", "prefill"]
# An int32 id (m,), or an array of logits (n_vocab,) for each of m rows.
Result = npt.NDArray[np.int32] | Many[npt.NDArray[np.float32]]
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
    @property
    def is_replayed(self) -> bool:
        """Whether a device replays decode calls, so that there are to be few shapes of them."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """For the result of a step that was queued.

    rows    the result, once it is there
    n_rows  of the result
    slot    the runner's own
    """

    rows: Result | None = None
    n_rows: int = 0
    slot: Any = None


class StepModel(Sizes, Protocol):
    """What the engine works on; runtime.model.Model is one."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def max_out_rows(self) -> int:
        """Most rows a prefill call gives results of."""
        ...

    @property
    def tails(self) -> Many[Tail]:
        """What its steps may end in."""
        ...

    @property
    def modes(self) -> Modes:
        """How it may be decoded."""
        ...

    def submit(self, batch: Batch, *, tail: Tail, follows: Ticket | None = None) -> Ticket:
        """Queue a step, K/V written in place. Where `modes.pipelined` is on it need not have run
        when this returns, and its tokens may be the ids that another decode call gives for the
        same rows, which it `follows`.
        """
        ...

    def collect(self, ticket: Ticket) -> Result:
        """What `run` gives, of a step that was queued; it holds until the second step from then is
        queued."""
        ...

    def run(self, batch: Batch, *, tail: Tail) -> Result:
        """One step, K/V written in place; what it gives holds until the next run.

        greedy: int32 (m,), the likeliest token of each of `out_rows` (the lowest id on a tie; -1
        where a logit is not a number); sampled: int32 (m,), tokens chosen as `Batch.sample` was
        told, -1 as artifact.Sampling says; logits: float32 (n_vocab,) of each of them.
        """
        ...

    def copy_block(self, group: int, source: int, destination: int) -> None:
        """Block `destination` of a group holds the K/V that `source` does, in every layer."""
        ...


class Batch:
    """The arrays of the step at hand; `fill` sets them, the model reads them.

    memory   all arrays, as bytes
    kind     of the call
    n_rows   rows of the call, padding included
    n_work   work items of the call, padding included
    """

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
        self._n_segments = -(-sizes.max_context // sizes.segment_tokens)
        n_columns = -(-sizes.max_context // sizes.block_tokens)
        n_groups, n_decode = len(sizes.windows), max(1, self._max_bucket)
        decode = Rows.shapes(n_decode, n_groups, n_decode, n_decode * self._n_segments)
        others = Rows.shapes(n_rows, n_groups, n_tiles, n_tiles * self._n_segments)
        tables = [(max(sizes.max_batch, n_decode), n_columns)] * n_groups
        self.memory, arrays = block_of([*decode, *others, *tables])
        self._decode = Rows(arrays[: len(decode)])
        self._others = Rows(arrays[len(decode) : -n_groups])
        self._groups = [Places(sizes.block_tokens, table) for table in arrays[-n_groups:]]
        if not sizes.is_replayed:
            self._keep_views()
        self._count = np.arange(max(sizes.max_context, n_rows), dtype=np.int32)
        self.n_rows = self.n_work = 0
        self._rows = self._decode  # of the step at hand
        # Rows of the call's tiles, block tables and out_rows.
        self._n_tiles = self._n_tables = self._n_out = 0
        # Of each row of a decode call its sequence and segments, as tiles and work say them.
        self._segments: list[tuple[int, int]] = []

    @property
    def slots(self) -> tuple[Ints, ...]:
        """Of each group."""
        return tuple([slots[self.n_rows] for slots in self._rows.slots])

    @property
    def block_tables(self) -> tuple[Ints, ...]:
        """Of each group."""
        return tuple([group.table[self._n_tables] for group in self._groups])

    @property
    def arrays(self) -> tuple[tuple[Leading, int], ...]:
        """The arrays of the step, as a call takes them: each and how much of it."""
        rows, n = self._rows, self.n_rows
        (slots, group), *further = zip(rows.slots, self._groups, strict=True)
        n_tables = self._n_tables
        return (
            (rows.tokens, n), (rows.positions, n), (slots, n), (rows.tiles, self._n_tiles),
            (rows.work, self.n_work), (group.table, n_tables), (rows.out_rows, self._n_out),
            *(each for s, g in further for each in ((s, n), (g.table, n_tables))),
        )  # fmt: skip

    @property
    def sampling(self) -> tuple[Leading, int]:
        """How a token of each row of the result is chosen, which a call that samples takes after
        `arrays`."""
        return self._rows.sampling, self._n_out if self.kind == "prefill" else self.n_rows

    def sample(self, place: int, sampling: Sampling, u: float, banned: Many[int]) -> None:
        """Say how the token of a row of the result is chosen; of padded rows it does not matter."""
        sampling.write(self._rows.sampling.flat, place, u, banned)

    @property
    def views(self) -> tuple[Ints, ...]:
        """`arrays` as such. A view that comes again is the same one."""
        return tuple([whole[n] for whole, n in self.arrays])

    def changed(self, *, tokens: bool = True) -> Iterator[Range]:
        """What of `memory` the step reads and nobody was told of yet; not its tokens without
        `tokens`."""
        yield from self._rows.changed(tokens=tokens)
        for group in self._groups:
            yield from group.changed()

    def kept(self) -> Iterator[Ints]:
        """All views there are; those of decode calls from the beginning."""
        for whole in (*self._decode, *self._others, *(group.table for group in self._groups)):
            yield from whole.views

    def fill(self, spans: Many[Span], *, every_row: bool = False) -> None:
        """Describe a step. out_rows are the last rows of the spans that end their sequence and the
        rows of their drafts, in the order of `spans`, or all rows with `every_row`. A step in which
        no result is wanted names its last row, because a call without any would need kernels for
        zero rows. Only decode calls take drafts, as many as the largest bucket has rows for.
        """
        if len(spans) <= self._max_bucket and all(s.count == 1 and s.is_last for s in spans):
            self._fill_decode(spans)
        else:
            self._fill_others(spans, every_row)

    def _keep_views(self) -> None:
        """So that decoding makes none, where each is a tensor of its own to the model."""
        for whole in (*self._decode, *(group.table for group in self._groups)):
            whole.keep(min(len(whole.all), self._max_bucket * self._n_segments))

    def _fill_decode(self, spans: Many[Span]) -> None:
        rows = self._decode
        tokens, positions = rows.tokens.all, rows.positions.all
        segments: list[tuple[int, int]] = []
        for seq, span in enumerate(spans):
            sequence, position = span.sequence, span.start
            self._write_tables(seq, sequence)
            for token in (sequence.tokens[position], *span.drafts):
                row = len(segments)
                tokens[row] = token
                positions[row] = position
                for group, slots, blocks in zip(
                    self._groups, rows.slots, sequence.blocks, strict=True
                ):
                    slots.all[row] = group.slot(blocks, position)
                segments.append((seq, position // self._sizes.segment_tokens + 1))
                position += 1
        n = len(segments)
        n_rows = next(bucket for bucket in self._buckets if bucket >= n)
        for row in range(n, n_rows):
            tokens[row], positions[row] = 0, 0
            for slots in rows.slots:
                slots.all[row] = -1
        if segments != self._segments:
            tiles = [(row, 1, seq, self._last(last)) for row, (seq, last) in enumerate(segments)]
            self._write_tiling(rows, tiles, range(n), n_rows if self._sizes.is_replayed else 0)
            self._segments = segments
        self._view(rows, n_rows, n, "decode" if n_rows == 1 else "cols")
        if self._sizes.is_replayed:
            self._n_tiles = self._n_tables = self._n_out = n_rows
        else:
            self._n_tables = len(spans)

    def _fill_others(self, spans: Many[Span], every_row: bool) -> None:
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
        self._write_tiling(self._others, balanced(tiles), wanted, 0)
        self._view(self._others, row, len(wanted), "prefill")
        self._n_tables = len(spans)

    def _view(self, rows: Rows, n_rows: int, n_out: int, kind: Kind) -> None:
        self.kind, self.n_rows, self._rows = kind, n_rows, rows
        self.tokens = rows.tokens[n_rows]
        self.positions = rows.positions[n_rows]
        self.tiles, self.work = rows.tiles[rows.n_tiles], rows.work[rows.n_items]
        self.out_rows = rows.out_rows[n_out]
        self.n_work = rows.n_work
        self._n_tiles, self._n_out = rows.n_tiles, n_out

    def _last(self, n_segments: int) -> int:
        return n_segments * self._sizes.segment_tokens - 1

    def _write_rows(self, row: int, seq: int, span: Span) -> None:
        rows = slice(row, row + span.count)
        positions = self._count[span.start : span.start + span.count]
        arrays = self._others
        arrays.tokens.all[rows] = span.sequence.tokens[span.start : span.start + span.count]
        arrays.positions.all[rows] = positions
        for group, slots in zip(self._groups, arrays.slots, strict=True):
            slots.all[rows] = group.slots(seq, positions)

    def _write_tables(self, seq: int, sequence: Sequence) -> None:
        for group, blocks in zip(self._groups, sequence.blocks, strict=True):
            group.write_table(seq, sequence, blocks)

    def _write_tiling(
        self, rows: Rows, tiles: list[_Tile], wanted: Iterable[int], n_rows: int
    ) -> None:
        """Tiles, their work and the rows that are wanted; padded for `n_rows` rows, unless 0."""
        entries: list[int] = []
        items: list[int] = []
        for row, n, seq, last in tiles:
            n_segments = last // self._sizes.segment_tokens + 1
            entries += (row, n, len(items) // 4, n_segments)
            for segment in range(n_segments):
                items += (row, n, seq, segment)
        rows.n_tiles, rows.n_items = len(tiles), len(items) // 4
        rows.n_work = rows.n_items
        if n_rows:
            for row in range(len(tiles), n_rows):
                entries += (row, 0, 0, 0)
            rows.n_work = min(1 << (rows.n_items - 1).bit_length(), n_rows * self._n_segments)
            items += [0] * (4 * (rows.n_work - rows.n_items))
            wanted = range(n_rows)
        rows.tiles.write(entries)
        rows.work.write(items)
        rows.out_rows.write(wanted)
        rows.is_changed = True


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
