"""Sub-blocks of packed weights as vectors: what a layout decodes and every kernel consumes.

Decoding a sub-block (32 columns of 8 rows, or of a single row for the embedding) emits its vectors.
A weight is `scale * factor * (q - offset) + minimum * min_factor`, with the scales per row, the
factors small integers per row and half (16 columns), and everything but q and scale optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.tir import Buffer, Expr, T
from xpuc.schedules.packed.bits import COLUMNS, PIECES


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

    def int32(self, name: str, start: Expr) -> Expr:
        """One number of each row as int32."""
        return tir.let(tir.cast(self.load(name, start, 1), "int32", self.lanes))

    def bytes(self, name: str, sub_block: Expr) -> tuple[Expr, ...]:
        """The 8 vectors of a sub-block that are stored as whole bytes."""
        return tuple(self.load(name, sub_block * COLUMNS + 4 * v, 4) for v in range(8))

    def quants(self, name: str, sub_block: Expr, bits: int, raised: int = 0) -> tuple[Expr, ...]:
        """The 8 vectors of a sub-block stored as `packing.pack_bits` lays them out.

        Those of the second half come times 2 ** `raised`, which spares shifts.
        """
        lanes = 4 * self.lanes
        start = sub_block * bits * 4
        units = [tir.let(self.load(name, start + 4 * i, 4)) for i in range(bits)]
        return tuple(
            _joined(units, pieces, lanes, raised * (v // 4))
            for v, pieces in enumerate(PIECES[bits])
        )


Halves = tuple[Expr, Expr]  # of the first 16 columns and of the others; one object if equal


@dataclass(frozen=True)
class SubBlock:
    """32 columns of `lanes` rows.

    `quants`: 8 vectors of bytes, lane `row * 4 + t` of vector v is column 4 v + t; unsigned ones
    reach up to `top`, signed ones have `top` None. `scale` and `minimum`: f32, one a row. Factors:
    int32 that fit int16, one a row, so that products with them stay exact.
    """

    lanes: int
    quants: tuple[Expr, ...]
    scale: Expr
    top: int | None = None
    offset: int = 0
    factors: Halves | None = None
    minimum: Expr | None = None
    min_factors: Halves | None = None


@dataclass(frozen=True)
class Constant:
    """What every unit of x adds to a product: `value`, f32, times the half's factor, also f32."""

    value: Expr
    factors: Halves | None = None


def _joined(
    units: list[Expr], pieces: tuple[tuple[int, int, int], ...], lanes: int, taken: int
) -> Expr:
    """The pieces next to each other from bit `taken` up."""
    value = None
    for byte, low, count in pieces:
        mask = ((1 << count) - 1) << taken
        shift = tir.const(low - taken, "uint8", lanes)
        piece = T.shift_right(units[byte], shift) if low > taken else units[byte]
        piece = piece & tir.const(mask, "uint8", lanes)
        value = piece if value is None else value | piece
        taken += count
    return value


def scaled_and_shifted(block: View, j: Expr, bits: int) -> SubBlock:
    """Sub-block j of a block with planes `qs`, `scales`, `mins`, `d` and `m` (Q4_K, Q5_K)."""
    d, m = block.f32("d"), block.f32("m")
    quants = block.quants("qs", j, bits=bits)
    factor, min_factor = block.int32("scales", j), block.int32("mins", j)
    return SubBlock(
        block.lanes,
        quants,
        d,
        top=(1 << bits) - 1,
        factors=(factor, factor),
        minimum=m,
        min_factors=(min_factor, min_factor),
    )


def columns(sub: SubBlock) -> list[Expr]:
    """The 32 columns of 8 rows as f32 vectors."""
    scales, minimums = _scaled(sub.scale, sub.factors, sub.lanes), _minimums(sub)
    result = []
    for c in range(COLUMNS):
        vector, t = sub.quants[c // 4], c % 4
        q = tir.cast(_lane_of_four(vector, t, sub), "float32", sub.lanes)
        result.append(_weight(q, scales, minimums, c // 16, sub.lanes))
    return result


def quads(sub: SubBlock) -> list[Expr]:
    """The 32 columns of a single row as 8 f32 vectors of 4 columns."""
    assert sub.lanes == 1
    scales, minimums = _scaled(sub.scale, sub.factors, 1), _minimums(sub)
    result = []
    for v, vector in enumerate(sub.quants):
        q = tir.cast(tir.cast(vector, "int32", 4) - tir.const(sub.offset, "int32", 4), "float32", 4)
        scale = tir.splat(scales[v // 4], 4)
        minimum = None if minimums is None else tir.splat(minimums[v // 4], 4)
        result.append(q * scale if minimum is None else tir.fma(q, scale, minimum, 4))
    return result


def constant(sub: SubBlock, bias: int) -> Constant | None:
    """The minimum, or the offset taken off with the `bias` that products add to every quant."""
    value, factors, shift = sub.minimum, sub.min_factors, sub.offset + bias
    if shift:
        assert value is None, "a minimum beside an offset"
        value, factors = sub.scale * tir.const(-shift, "float32", sub.lanes), sub.factors
    if value is None or factors is None:
        return None if value is None else Constant(tir.let(value))
    first, second = _floats(factors, sub.lanes)
    if first is second:
        return Constant(tir.let(value * first))
    return Constant(tir.let(value), (first, second))


def _floats(factors: Halves, lanes: int) -> Halves:
    first = tir.let(tir.cast(factors[0], "float32", lanes))
    if factors[0] is factors[1]:
        return first, first
    return first, tir.let(tir.cast(factors[1], "float32", lanes))


def _scaled(scale: Expr, factors: Halves | None, lanes: int) -> Halves:
    """scale * factor as f32."""
    if factors is None:
        return scale, scale
    first, second = (tir.let(scale * f) for f in _floats(factors, lanes))
    return first, second


def _minimums(sub: SubBlock) -> Halves | None:
    if sub.minimum is None:
        return None
    return _scaled(sub.minimum, sub.min_factors, sub.lanes)


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
