"""Sub-blocks of packed weights as vectors: what a layout decodes and every kernel consumes.

Decoding a sub-block (32 columns of 8 rows, or of a single row for the embedding) emits its vectors.
A weight is `scale * factor * (q - offset) + minimum * min_factor`, with the scales per row, the
factors per row or per row and half (16 columns), and everything but q optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.packing import COLUMNS, PIECES, ROWS
from xpuc.schedules.llvm.tir import Buffer, Expr, T


class Lookup(Protocol):
    """`table[index]` in every lane of a uint8 vector; the table has 16 signed bytes."""

    def __call__(self, table: Sequence[int], index: Expr, lanes: int) -> Expr: ...


@dataclass(frozen=True)
class View:
    """One block of `lanes` rows: all 8 of a group, or row `row` of it alone."""

    planes: Mapping[str, tuple[Buffer, int]]  # buffer, elements of a row in a block
    block: Expr  # counted over all row groups
    lookup: Lookup
    lanes: int = ROWS
    row: Expr = 0

    def load(self, name: str, start: Expr, width: int) -> Expr:
        """Elements [start, start + width) of each row, row after row; `width` is the field's."""
        buffer, per_block = self.planes[name]
        index = (self.block * per_block + start) * ROWS + self.row * width
        return tir.load(buffer, index, self.lanes * width)

    def f32(self, name: str, start: Expr = 0) -> Expr:
        """One number of each row as f32."""
        return tir.let(tir.cast(self.load(name, start, 1), "float32", self.lanes))

    def bytes(self, name: str, sub_block: Expr) -> tuple[Expr, ...]:
        """The 8 vectors of a sub-block that are stored as whole bytes."""
        return tuple(self.load(name, sub_block * COLUMNS + 4 * v, 4) for v in range(8))

    def quants(self, name: str, sub_block: Expr, bits: int) -> tuple[Expr, ...]:
        """The 8 vectors of a sub-block stored as `packing.pack_bits` lays them out."""
        lanes = 4 * self.lanes
        start = sub_block * bits * 4
        units = [tir.let(self.load(name, start + 4 * i, 4)) for i in range(bits)]
        return tuple(_joined(units, pieces, lanes) for pieces in PIECES[bits])


@dataclass(frozen=True)
class Factors:
    """Small multipliers: `per_row` bytes for each row, one of all columns or one of each half."""

    values: Expr
    per_row: int


@dataclass(frozen=True)
class SubBlock:
    """32 columns of `lanes` rows.

    `quants`: 8 vectors of bytes, lane `row * 4 + t` of vector v is column 4 v + t; unsigned ones
    reach up to `top`, signed ones have `top` None. `scale` and `minimum`: f32, one a row.
    """

    lanes: int
    quants: tuple[Expr, ...]
    scale: Expr
    top: int | None = None
    offset: int = 0
    factors: Factors | None = None
    minimum: Expr | None = None
    min_factors: Factors | None = None


def _joined(units: list[Expr], pieces: tuple[tuple[int, int, int], ...], lanes: int) -> Expr:
    value, taken = None, 0
    for byte, low, count in pieces:
        mask = ((1 << count) - 1) << taken
        shift = tir.const(low - taken, "uint8", lanes)
        piece = T.shift_right(units[byte], shift) if low > taken else units[byte]
        piece = piece & tir.const(mask, "uint8", lanes)
        value = piece if value is None else value | piece
        taken += count
    return value


def columns(sub: SubBlock) -> list[Expr]:
    """The 32 columns of 8 rows as f32 vectors."""
    scales, minimums = half_values(sub.factors, sub.scale, sub.lanes), _minimums(sub)
    result = []
    for c in range(COLUMNS):
        vector, t = sub.quants[c // 4], c % 4
        q = tir.cast(_lane_of_four(vector, t, sub), "float32", sub.lanes)
        result.append(_weight(q, scales, minimums, c // 16, sub.lanes))
    return result


def quads(sub: SubBlock) -> list[Expr]:
    """The 32 columns of a single row as 8 f32 vectors of 4 columns."""
    assert sub.lanes == 1
    scales, minimums = half_values(sub.factors, sub.scale, 1), _minimums(sub)
    result = []
    for v, vector in enumerate(sub.quants):
        q = tir.cast(tir.cast(vector, "int32", 4) - tir.const(sub.offset, "int32", 4), "float32", 4)
        scale = tir.splat(scales[v // 4], 4)
        minimum = None if minimums is None else tir.splat(minimums[v // 4], 4)
        result.append(q * scale if minimum is None else tir.fma(q, scale, minimum, 4))
    return result


def split_halves(factors: Factors, lanes: int) -> tuple[Expr, Expr]:
    """The factors of each half of the columns, one byte a row."""
    if factors.per_row == 1:
        return factors.values, factors.values
    first, second = (
        tir.shuffle(factors.values, [2 * row + half for row in range(lanes)]) for half in (0, 1)
    )
    return first, second


def half_values(factors: Factors | None, scale: Expr, lanes: int) -> tuple[Expr, Expr]:
    """scale * factor as f32 for each half of the columns."""
    if factors is None:
        return scale, scale
    if factors.per_row == 1:
        value = tir.let(scale * tir.cast(factors.values, "float32", lanes))
        return value, value
    first, second = (
        tir.let(scale * tir.cast(f, "float32", lanes)) for f in split_halves(factors, lanes)
    )
    return first, second


def _minimums(sub: SubBlock) -> tuple[Expr, Expr] | None:
    if sub.minimum is None:
        return None
    return half_values(sub.min_factors, sub.minimum, sub.lanes)


def half_constants(sub: SubBlock, scales: tuple[Expr, Expr], bias: int) -> tuple[Expr, Expr] | None:
    """What each half adds for every unit of x: the minimum, and the offset taken off.

    `bias` is what the products have added to every quant besides. None: there is nothing to add.
    """
    minimums, shift = _minimums(sub), sub.offset + bias
    if not shift:
        return minimums
    off = tir.const(-shift, "float32", sub.lanes)
    if minimums is None and scales[0] is scales[1]:
        both = tir.let(scales[0] * off)
        return both, both
    if minimums is None:
        return tir.let(scales[0] * off), tir.let(scales[1] * off)
    first, second = (
        tir.let(tir.fma(s, off, m, sub.lanes)) for s, m in zip(scales, minimums, strict=True)
    )
    return first, second


def _weight(
    q: Expr, scales: Sequence[Expr], minimums: Sequence[Expr] | None, half: int, lanes: int
) -> Expr:
    if minimums is None:
        return q * scales[half]
    return tir.fma(q, scales[half], minimums[half], lanes)


def _lane_of_four(vector: Expr, t: int, sub: SubBlock) -> Expr:
    """Byte t of each row's four, as int32 without the offset."""
    words = tir.bits(vector, "int32", sub.lanes)
    if sub.top is None:
        words = T.shift_left(words, tir.const(24 - 8 * t, "int32", sub.lanes))
        return T.shift_right(words, tir.const(24, "int32", sub.lanes))
    words = T.shift_right(words, tir.const(8 * t, "int32", sub.lanes))
    words = words & tir.const(255, "int32", sub.lanes)
    return words - tir.const(sub.offset, "int32", sub.lanes) if sub.offset else words
