"""Products of packed weights with activations: one row group against the rows of a tile.

The order of additions is fixed: blocks of 32 columns ascending, each added to the row's accumulator
by fma. So a row has the same bits in a call with 1 row and in a call with many. Small scales of the
K formats are part of the integer products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import (
    Constant,
    SubBlock,
    View,
    columns,
    constant,
)
from xpuc.schedules.llvm.isa import Isa, Row
from xpuc.schedules.llvm.layouts import Layout, layout_of, planes
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.quantize import Q8a, q8a_args
from xpuc.schedules.llvm.tir import Buffer, Expr, T
from xpuc.schedules.packed import COLUMNS, Field

MOST_UNROLLED = 4  # rows whose accumulators stay in registers
_LINE = 64  # bytes of a cache line
_CHAINS = 2  # sums a row's f32 columns alternate between, for the latency of fma
_SIDE_BY_SIDE = (4, 1)  # rows summed together, widest first


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
    groups: int = 2  # row groups walked side by side: memory is faster read in two streams


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


def side_by_side(rows: int | Expr, knobs: LinearKnobs) -> int:
    """Row groups in a turn: more than one only for one row, where memory is what takes time."""
    return knobs.groups if isinstance(rows, int) and rows == 1 else 1


def turn_groups(groups: int, turn: Expr, count: int) -> list[Expr]:
    """The row groups of a turn, a walk's length apart so that each walks on where it stopped.

    Where there are fewer, the first of them again, which changes nothing.
    """
    turns = -(-groups // count)
    found = [turn]
    for i in range(1, count):
        group = tir.let(turn + i * turns)
        inside = (i + 1) * turns <= groups
        found.append(group if inside else tir.let(T.Select(group < groups, group, turn)))
    return found


def tile_rows(rows: int | Expr, m_tile: int) -> int:
    """The accumulators a tile needs room for."""
    return min(rows, m_tile) if isinstance(rows, int) else m_tile


@dataclass(frozen=True)
class Part:
    """A row group of a weight, and the accumulators of its product: 8 for each row of a tile."""

    operand: Operand
    group: Expr
    acc: Buffer


def sub_blocks(
    parts: Sequence[Part], isa: Isa, knobs: LinearKnobs, unroll: int
) -> Iterator[tuple[Part, SubBlock, Expr]]:
    """The loop over the decoded sub-blocks of all parts, each with its number in the row."""
    layout, blocks = parts[0].operand.layout, parts[0].operand.blocks
    each, decode = layout.sub_blocks, layout.sub_block
    assert decode is not None
    with tir.serial(0, blocks) as block:
        starts = [tir.let(part.group * blocks + block) for part in parts]
        asks = [Prefetch(p.operand, knobs.prefetch_bytes, each // unroll) for p in parts]
        for ask, start in zip(asks, starts, strict=True):
            ask.block(start)
        with tir.serial(0, each // unroll) as turn:
            for ask, start in zip(asks, starts, strict=True):
                ask.turn(start, turn)
            for u in range(unroll):
                j = tir.let(turn * unroll + u)
                for part, start in zip(parts, starts, strict=True):
                    yield part, decode(part.operand.view(isa, start), j), block * each + j


@dataclass(frozen=True)
class Product:
    """The multiplication of one kernel's activations."""

    x: Q8a | Buffer
    isa: Isa
    knobs: LinearKnobs

    def emit(self, parts: Sequence[Part], tile: Tile) -> None:
        """Fill acc[8 i : 8 i + 8] of each part with row i of the tile times its 8 weight rows.

        The parts are walked side by side: their layouts are the same.
        """

        def clear(i: Expr) -> None:
            for part in parts:
                tir.store(part.acc, i * ROWS, tir.const(0.0, "float32", ROWS), ROWS)

        tile.each(clear)
        if isinstance(self.x, Q8a):
            self._quantised(parts, tile)
        else:
            _Exact(self.x, self.isa, self.knobs).emit(parts, tile)

    def _quantised(self, parts: Sequence[Part], tile: Tile) -> None:
        layout = parts[0].operand.layout
        assert layout.sub_block is not None, f"{layout.name} takes f32 activations"
        unroll = _divisor(layout.sub_blocks, self.knobs.unroll)
        for part, sub, number in sub_blocks(parts, self.isa, self.knobs, unroll):
            self._add(sub, number, tile, part.acc)

    def _add(self, sub: SubBlock, block: Expr, tile: Tile, acc: Buffer) -> None:
        """acc += one sub-block."""
        assert isinstance(self.x, Q8a)
        x, dot = self.x, self.isa.dot(sub)
        added = constant(sub, self.isa.bias(sub))

        def one(i: Expr) -> None:
            row = Row(x, block, tile.start + i)
            total = tir.load(acc, i * ROWS, ROWS)
            if added is not None:
                total = tir.fma(added.value, _per_unit(added, row), total, ROWS)
            first, second = (tir.cast(d, "float32", ROWS) for d in dot(row))
            both = tir.fma(second, row.scale(1), first * row.scale(0), ROWS)
            tir.store(acc, i * ROWS, tir.fma(both, sub.scale, total, ROWS), ROWS)

        tile.each(one)


def _per_unit(added: Constant, row: Row) -> Expr:
    """The sum of x, that of each half times its factor."""
    if added.factors is None:
        return row.total()
    first, second = added.factors
    return tir.fma(second, row.half_sum(1), first * row.half_sum(0), ROWS)


@dataclass(frozen=True)
class _Exact:
    """f32 activations: of each run of 32 columns the even ones summed by fma and the odd ones.

    Both in ascending order; then even + odd is added to the row's accumulator.
    """

    x: Buffer
    isa: Isa
    knobs: LinearKnobs

    def emit(self, parts: Sequence[Part], tile: Tile) -> None:
        weights = None if tile.is_unrolled else tir.scratch(COLUMNS * ROWS, "float32")
        layout, k = parts[0].operand.layout, parts[0].operand.k

        def add(values: list[Expr], column: Expr, acc: Buffer) -> None:
            if weights is None:
                self._chains(values, column, tile.start, list(range(tile.count)), acc)
            else:
                self._add_tile(values, column, tile, acc, weights)

        if layout.sub_block is None:
            whole, rest = divmod(k, COLUMNS)
            with tir.serial(0, whole) as run:
                for part in parts:
                    add(self._run(part, run * COLUMNS, COLUMNS), run * COLUMNS, part.acc)
            for part in parts if rest else ():
                add(self._run(part, whole * COLUMNS, rest), whole * COLUMNS, part.acc)
            return
        for part, sub, number in sub_blocks(parts, self.isa, self.knobs, unroll=1):
            add(columns(sub), number * COLUMNS, part.acc)

    def _run(self, part: Part, column: Expr, count: int) -> list[Expr]:
        operand = part.operand
        value, first = operand.layout.value, tir.let(part.group * operand.k + column)
        assert value is not None
        Prefetch(operand, self.knobs.prefetch_bytes).turn(first, 0, count)
        return [value(operand.view(self.isa, first + c)) for c in range(count)]

    def _add_tile(
        self, values: list[Expr], column: Expr, tile: Tile, acc: Buffer, weights: Buffer
    ) -> None:
        for c, value in enumerate(values):
            tir.store(weights, c * ROWS, value, ROWS)
        decoded = [tir.load(weights, c * ROWS, ROWS) for c in range(len(values))]
        done: Expr = 0
        for width in _SIDE_BY_SIDE:
            steps = tir.floordiv(tile.count - done, width)
            with tir.serial(0, steps) as step:
                rows = [done + step * width + i for i in range(width)]
                self._chains(decoded, column, tile.start, rows, acc)
            done = done + steps * width

    def _chains(
        self, values: list[Expr], column: Expr, start: Expr, rows: list[Expr], acc: Buffer
    ) -> None:
        sums = [[tir.const(0.0, "float32", ROWS)] * _CHAINS for _ in rows]
        for c, value in enumerate(values):
            weight, chain = tir.let(value), c % _CHAINS
            for i, row in enumerate(rows):
                x = self._x(start + row, column + c)
                sums[i][chain] = tir.let(tir.fma(weight, x, sums[i][chain], ROWS))
        for row, chains in zip(rows, sums, strict=True):
            self._finish(chains, row, acc)

    def _x(self, row: Expr, column: Expr) -> Expr:
        return tir.splat(tir.load(self.x, (row, column), 1), ROWS)

    def _finish(self, chains: list[Expr], row: Expr, acc: Buffer) -> None:
        total = tir.load(acc, row * ROWS, ROWS) + tir.tree_sum(chains)
        tir.store(acc, row * ROWS, total, ROWS)


@dataclass(frozen=True)
class Prefetch:
    """Asks for the cache lines of a block, `distance` bytes of the widest plane ahead.

    Lines are asked for as evenly as they are used, in `turns` turns of a block: a burst of them
    stalls. Planes of less than a line a turn are asked for with the first.
    """

    operand: Operand
    distance: int
    turns: int = 1

    def block(self, at: Expr) -> None:
        """With the first turn of block `at`."""
        for f in self._planes():
            if self._width(f) < _LINE * self.turns:
                self._ask(f, at, 0, 1)

    def turn(self, at: Expr, turn: Expr, count: int = 1) -> None:
        """In each turn; of formats without blocks for `count` columns."""
        for f in self._planes():
            size = count * self._width(f) // self.turns
            if size >= _LINE:
                self._ask(f, at, turn * size, -(-size // _LINE))

    def _planes(self) -> tuple[Field, ...]:
        return self.operand.layout.planes if self.distance else ()

    def _width(self, f: Field) -> int:
        return f.per_block * ROWS * tir.size_of(f.dtype)

    def _ask(self, f: Field, at: Expr, start: Expr, lines: int) -> None:
        ahead = -(-self.distance // max(self._width(p) for p in self._planes()))
        buffer, per_block = self.operand.planes[f.name]
        size = tir.size_of(f.dtype)
        first = (at + ahead) * (per_block * ROWS)
        for i in range(lines):
            tir.prefetch(buffer, first + tir.floordiv(start + i * _LINE, size))


def _divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`."""
    return next(d for d in range(min(count, most), 0, -1) if count % d == 0)
