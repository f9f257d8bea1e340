"""Products of packed weights with activations: one row group against the rows of a tile.

The order of additions is fixed: blocks of 32 columns ascending, each added to the row's accumulator
by fma. So a row has the same bits in a call with 1 row and in a call with many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import (
    SubBlock,
    View,
    columns,
    half_constants,
    half_values,
)
from xpuc.schedules.llvm.isa import Isa, Row
from xpuc.schedules.llvm.layouts import Layout, layout_of, planes
from xpuc.schedules.llvm.packing import COLUMNS, ROWS
from xpuc.schedules.llvm.quantize import Q8a, q8a_args
from xpuc.schedules.llvm.tir import Buffer, Expr, T

MOST_UNROLLED = 4  # rows whose accumulators stay in registers
_CHAINS = (8, 4, 1)  # rows whose f32 chains run side by side, widest first: 8 hide the latency


@dataclass(frozen=True)
class Weight:
    """A packed matrix: its format and its rows, padded to whole groups of 8 in memory only."""

    format: str
    rows: int


@dataclass(frozen=True)
class LinearKnobs:
    """What can be tuned. The results do not depend on it."""

    prefetch_bytes: int = 1024  # how far ahead of the multiplication weights are asked for
    m_tile: int = 64  # rows that share one decoding of the weights
    unroll: int = 2  # sub-blocks of a block in one turn of the loop: more need more registers


@dataclass(frozen=True)
class Operand:
    """A weight and its buffers."""

    weight: Weight
    layout: Layout
    k: int
    planes: dict[str, tuple[Buffer, int]]

    @property
    def groups(self) -> int:
        """Row groups."""
        return -(-self.weight.rows // ROWS)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.k // self.layout.columns

    def view(self, isa: Isa, block: Expr, lanes: int = ROWS, row: Expr = 0) -> View:
        """A block by its number, counted over all row groups."""
        return View(self.planes, block, isa.lookup, lanes, row)


def operand_args(weight: Weight, k: int, prefix: str) -> Operand:
    """Declare the planes of a weight as the next arguments of the kernel."""
    layout = layout_of(weight.format)
    buffers = {
        plane.name: (tir.arg(f"{prefix}_{plane.name}", (plane.size,), plane.dtype), f.per_block)
        for plane, f in zip(planes(weight.format, weight.rows, k), layout.planes, strict=True)
    }
    return Operand(weight, layout, k, buffers)


def activation_args(activation: str, k: int, rows: int | Expr) -> Q8a | Buffer:
    """Declare the activations as the next arguments: q8a, or f32 (rows, k)."""
    assert activation in ("q8", "f32"), activation
    return q8a_args(k, rows) if activation == "q8" else tir.arg("x", (rows, k), "float32")


def kernel_name(
    word: str, weights: tuple[Weight, ...], k: int, n: int | None, activation: str
) -> str:
    """Such as linear_q4_1_960x576_r1, with `_f32` where the activations are not quantised."""
    shapes = "_".join(f"{w.format.lower()}_{w.rows}" for w in weights)
    exact = "" if activation == "q8" else "_f32"
    return f"{word}_{shapes}x{k}{exact}_r{n or 'n'}"


@dataclass(frozen=True)
class Tile:
    """Rows [start, start + count) of a call."""

    start: Expr
    count: int | Expr

    @property
    def is_unrolled(self) -> bool:
        """Whether each row has code of its own."""
        return isinstance(self.count, int) and self.count <= MOST_UNROLLED

    def each(self, emit: Callable[[Expr], None]) -> None:
        """Emit code for every row; the argument counts from the start of the tile."""
        if isinstance(self.count, int) and self.is_unrolled:
            for i in range(self.count):
                emit(i)
        else:
            with tir.serial(0, self.count) as i:
                emit(i)


@contextmanager
def tiles(rows: int | Expr, m_tile: int) -> Iterator[Tile]:
    """The loop over tiles of at most `m_tile` rows."""
    if isinstance(rows, int) and rows <= m_tile:
        yield Tile(0, rows)
        return
    count = -(-rows // m_tile) if isinstance(rows, int) else T.ceildiv(rows, tir.long(m_tile))
    with tir.serial(0, count) as tile:
        start = tir.let(tir.cast(tile, "int64") * m_tile)
        yield Tile(start, tir.let(T.min(tir.long(m_tile), rows - start)))


def tile_rows(rows: int | Expr, m_tile: int) -> int:
    """The accumulators a tile needs room for."""
    return min(rows, m_tile) if isinstance(rows, int) else m_tile


@dataclass(frozen=True)
class Product:
    """The multiplication of one kernel's activations."""

    x: Q8a | Buffer
    isa: Isa
    knobs: LinearKnobs

    def emit(self, operand: Operand, group: Expr, tile: Tile, acc: Buffer) -> None:
        """Fill acc[8 i : 8 i + 8] with row i of the tile times the 8 weight rows of the group."""
        zero = tir.const(0.0, "float32", ROWS)
        tile.each(lambda i: tir.store(acc, i * ROWS, zero, ROWS))
        if isinstance(self.x, Q8a):
            self._quantised(operand, group, tile, acc)
        else:
            _Exact(self.x, self.isa, self.knobs).emit(operand, group, tile, acc)

    def _quantised(self, operand: Operand, group: Expr, tile: Tile, acc: Buffer) -> None:
        layout = operand.layout
        assert layout.sub_block is not None, f"{layout.name} takes f32 activations"
        each, unroll = layout.sub_blocks, _divisor(layout.sub_blocks, self.knobs.unroll)
        with tir.serial(0, operand.blocks) as block:
            at = tir.let(group * operand.blocks + block)
            view = operand.view(self.isa, at)
            prefetch(operand, at, self.knobs.prefetch_bytes)
            with tir.serial(0, each // unroll) as turn:
                for u in range(unroll):
                    j = tir.let(turn * unroll + u)
                    self._add(layout.sub_block(view, j), block * each + j, tile, acc)

    def _add(self, sub: SubBlock, block: Expr, tile: Tile, acc: Buffer) -> None:
        """acc += one sub-block."""
        assert isinstance(self.x, Q8a)
        x, dot = self.x, self.isa.dot(sub)
        scales = half_values(sub.factors, sub.scale, ROWS)
        constants = half_constants(sub, scales, self.isa.bias(sub))

        def one(i: Expr) -> None:
            row = Row(x, block, tile.start + i)
            total = tir.load(acc, i * ROWS, ROWS)
            first, second = (tir.cast(d, "float32", ROWS) for d in dot(row))
            if scales[0] is scales[1]:
                both = tir.fma(second, row.scale(1), first * row.scale(0), ROWS)
                total = tir.fma(both, scales[0], total, ROWS)
            else:
                total = tir.fma(first * row.scale(0), scales[0], total, ROWS)
                total = tir.fma(second * row.scale(1), scales[1], total, ROWS)
            if constants is not None and constants[0] is constants[1]:
                total = tir.fma(constants[0], row.total(), total, ROWS)
            elif constants is not None:
                total = tir.fma(constants[0], row.half_sum(0), total, ROWS)
                total = tir.fma(constants[1], row.half_sum(1), total, ROWS)
            tir.store(acc, i * ROWS, total, ROWS)

        tile.each(one)


@dataclass(frozen=True)
class _Exact:
    """f32 activations: per run of 32 columns a chain of fma in ascending order, then added."""

    x: Buffer
    isa: Isa
    knobs: LinearKnobs

    def emit(self, operand: Operand, group: Expr, tile: Tile, acc: Buffer) -> None:
        add = self._add_unrolled if tile.is_unrolled else self._add_tile
        weights = None if tile.is_unrolled else tir.scratch(COLUMNS * ROWS, "float32")
        decode = operand.layout.sub_block
        if decode is None:
            whole, rest = divmod(operand.k, COLUMNS)
            with tir.serial(0, whole) as run:
                first = tir.let(group * operand.k + run * COLUMNS)
                prefetch(operand, first, self.knobs.prefetch_bytes, COLUMNS)
                add(self._run(operand, first, COLUMNS), run * COLUMNS, tile, acc, weights)
            if rest:
                first = tir.let(group * operand.k + whole * COLUMNS)
                add(self._run(operand, first, rest), whole * COLUMNS, tile, acc, weights)
            return
        with tir.serial(0, operand.blocks) as block:
            first = tir.let(group * operand.blocks + block)
            prefetch(operand, first, self.knobs.prefetch_bytes)
            with tir.serial(0, operand.layout.sub_blocks) as j:
                sub = decode(operand.view(self.isa, first), j)
                column = block * operand.layout.columns + j * COLUMNS
                add(columns(sub), column, tile, acc, weights)

    def _run(self, operand: Operand, first: Expr, count: int) -> list[Expr]:
        value = operand.layout.value
        assert value is not None
        return [value(operand.view(self.isa, first + c)) for c in range(count)]

    def _add_unrolled(
        self, values: list[Expr], column: Expr, tile: Tile, acc: Buffer, _: Buffer | None
    ) -> None:
        self._chains(values, column, tile.start, list(range(tile.count)), acc)

    def _add_tile(
        self, values: list[Expr], column: Expr, tile: Tile, acc: Buffer, weights: Buffer | None
    ) -> None:
        assert weights is not None
        for c, value in enumerate(values):
            tir.store(weights, c * ROWS, value, ROWS)
        done: Expr = 0
        for width in _CHAINS:
            steps = tir.floordiv(tile.count - done, width)
            with tir.serial(0, steps) as step:
                rows = [done + step * width + i for i in range(width)]
                self._loop(weights, len(values), column, tile.start, rows, acc)
            done = done + steps * width

    def _loop(
        self, weights: Buffer, count: int, column: Expr, start: Expr, rows: list[Expr], acc: Buffer
    ) -> None:
        """The chains over decoded columns."""
        sums = tir.scratch(len(rows) * ROWS, "float32")
        for i in range(len(rows)):
            tir.store(sums, i * ROWS, tir.const(0.0, "float32", ROWS), ROWS)
        with tir.serial(0, count) as c:
            weight = tir.let(tir.load(weights, c * ROWS, ROWS))
            for i, row in enumerate(rows):
                x = tir.splat(tir.load(self.x, (start + row, column + c), 1), ROWS)
                total = tir.fma(weight, x, tir.load(sums, i * ROWS, ROWS), ROWS)
                tir.store(sums, i * ROWS, total, ROWS)
        for i, row in enumerate(rows):
            total = tir.load(acc, row * ROWS, ROWS) + tir.load(sums, i * ROWS, ROWS)
            tir.store(acc, row * ROWS, total, ROWS)

    def _chains(
        self, values: list[Expr], column: Expr, start: Expr, rows: list[Expr], acc: Buffer
    ) -> None:
        sums = [tir.const(0.0, "float32", ROWS) for _ in rows]
        for c, value in enumerate(values):
            weight = tir.let(value)
            for i, row in enumerate(rows):
                x = tir.splat(tir.load(self.x, (start + row, column + c), 1), ROWS)
                sums[i] = tir.let(tir.fma(weight, x, sums[i], ROWS))
        for row, total in zip(rows, sums, strict=True):
            tir.store(acc, row * ROWS, tir.load(acc, row * ROWS, ROWS) + total, ROWS)


def prefetch(operand: Operand, first: Expr, distance_bytes: int, count: int = 1) -> None:
    """Ask for the cache lines of `count` blocks, `distance_bytes` of the widest plane ahead."""
    if not distance_bytes:
        return
    widths = {f.name: f.per_block * ROWS * tir.size_of(f.dtype) for f in operand.layout.planes}
    ahead = -(-distance_bytes // max(widths.values()))
    for f in operand.layout.planes:
        buffer, per_block = operand.planes[f.name]
        line = 64 // tir.size_of(f.dtype)
        for i in range(-(-count * widths[f.name] // 64)):
            tir.prefetch(buffer, (first + ahead) * (per_block * ROWS) + i * line)


def _divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`."""
    return next(d for d in range(min(count, most), 0, -1) if count % d == 0)
