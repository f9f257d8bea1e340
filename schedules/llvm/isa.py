"""Byte dot products of 8 weight rows with one activation row, in the instructions of each CPU.

All of them are exact integer sums, so the results of a kernel do not depend on the instructions.
Preparing a sub-block emits what depends on the weights alone; the function it returns emits the
rest for each row of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import Halves, SubBlock
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.quantize import Q8a
from xpuc.schedules.llvm.tir import Expr, T

_LARGEST = 127  # magnitude of a quantised activation
_INT16 = 32767


@dataclass(frozen=True)
class Row:
    """One block of 32 columns of one activation row."""

    x: Q8a
    block: Expr
    row: Expr

    def quad(self, v: int) -> Expr:
        """Columns 4 v to 4 v + 3, repeated for each weight row: int8x32."""
        word = tir.bits(tir.load(self.x.xq, (self.block, self.row, 4 * v), 4), "int32")
        return tir.bits(tir.splat(word, ROWS), "int8", 4 * ROWS)

    def scale(self, half: int) -> Expr:
        """That of half a block, f32, repeated for each weight row."""
        return tir.splat(tir.load(self.x.xd, (self.block, self.row, half), 1), ROWS)

    def half_sum(self, half: int) -> Expr:
        """The scaled sum of half the columns, repeated for each weight row."""
        return tir.splat(tir.load(self.x.xs, (self.block, self.row, half), 1), ROWS)

    def total(self) -> Expr:
        """The scaled sum of all columns, repeated for each weight row."""
        return tir.splat(tir.load(self.x.xt, (self.block, self.row), 1), ROWS)


Dot = Callable[[Row], tuple[Expr, Expr]]


class Isa(Protocol):
    """A set of instructions."""

    name: str

    def dot(self, sub: SubBlock) -> Dot:
        """factor * (the sum of (q + bias) * x), of each half of the 32 columns: two int32x8."""

    def bias(self, sub: SubBlock) -> int:
        """What `dot` has added to every quant."""

    def lookup(self, table: Sequence[int], index: Expr, lanes: int) -> Expr:
        """See blocks.Lookup."""


def isa_for(features: frozenset[str]) -> Isa:
    """The best one for LLVM feature names such as avx2, avxvnni, avx512vnni."""
    if {"avx512vnni", "avx512vl"} <= features or "avxvnni" in features:
        return Vnni()
    return Avx2() if "avx2" in features else Generic()


class Avx2:
    """vpmaddubsw (unsigned * signed bytes, pairs added) and vpmaddwd (int16, pairs added)."""

    name = "avx2"

    def dot(self, sub: SubBlock) -> Dot:
        if sub.top is None:
            products, fit = [_signed_product(tir.let(q)) for q in sub.quants], 1
        else:
            products = [_times(tir.let(q)) for q in sub.quants]
            fit = min(4, _INT16 // (2 * sub.top * _LARGEST))
        factors = _repeated(sub.factors)

        def half(row: Row, h: int) -> Expr:
            pairs = [products[v](row.quad(v)) for v in range(4 * h, 4 * h + 4)]
            runs = [pairs[i : i + fit] for i in range(0, 4, fit)]
            return tir.tree_sum(_maddwd(tir.tree_sum(run), factors[h]) for run in runs)

        return lambda row: (half(row, 0), half(row, 1))

    def bias(self, sub: SubBlock) -> int:
        return 0

    def lookup(self, table: Sequence[int], index: Expr, lanes: int) -> Expr:
        if lanes != 4 * ROWS:
            return _gather(table, index, lanes)
        twice = T.Shuffle([_constant(table)] * 2, list(range(16)) * 2)
        return _x86("int8x32", "avx2.pshuf.b", twice, tir.bits(index, "int8", 32))


class Vnni(Avx2):
    """vpdpbusd: four products of unsigned and signed bytes added to an int32."""

    name = "vnni"

    def dot(self, sub: SubBlock) -> Dot:
        weights = [tir.let(self._unsigned(q) if sub.top is None else q) for q in sub.quants]

        def half(row: Row, h: int) -> Expr:
            total = tir.const(0, "int32", ROWS)
            for v in range(4 * h, 4 * h + 4):
                total = _x86("int32x8", "avx512.vpdpbusd.256", total, weights[v], row.quad(v))
            return _times_factor(total, sub.factors, h)

        return lambda row: (half(row, 0), half(row, 1))

    def bias(self, sub: SubBlock) -> int:
        return 128 if sub.top is None else 0

    @staticmethod
    def _unsigned(quants: Expr) -> Expr:
        flipped = tir.bits(quants, "uint8", 4 * ROWS) ^ tir.const(128, "uint8", 4 * ROWS)
        return tir.bits(flipped, "int8", 4 * ROWS)


class Generic:
    """Plain vector arithmetic, right on every target LLVM has."""

    name = "generic"

    def dot(self, sub: SubBlock) -> Dot:
        weights = [tir.let(tir.cast(q, "int16", 4 * ROWS)) for q in sub.quants]
        fit = min(4, _INT16 // ((sub.top or 128) * _LARGEST))

        def half(row: Row, h: int) -> Expr:
            products = [
                weights[v] * tir.cast(row.quad(v), "int16", 4 * ROWS)
                for v in range(4 * h, 4 * h + 4)
            ]
            runs = [products[i : i + fit] for i in range(0, 4, fit)]
            total = tir.tree_sum(_sum_of_four(tir.tree_sum(run)) for run in runs)
            return _times_factor(total, sub.factors, h)

        return lambda row: (half(row, 0), half(row, 1))

    def bias(self, sub: SubBlock) -> int:
        return 0

    def lookup(self, table: Sequence[int], index: Expr, lanes: int) -> Expr:
        return _gather(table, index, lanes)


def _x86(dtype: str, name: str, *args: Expr) -> Expr:
    return T.call_llvm_pure_intrin(dtype, f"llvm.x86.{name}", *args)


def _maddubs(unsigned: Expr, signed: Expr) -> Expr:
    return _x86("int16x16", "avx2.pmadd.ub.sw", unsigned, signed)


def _maddwd(a: Expr, b: Expr) -> Expr:
    return _x86("int32x8", "avx2.pmadd.wd", a, b)


def _repeated(factors: Halves | None) -> Halves:
    """Each factor twice as int16, which vpmaddwd then multiplies pairs with."""
    if factors is None:
        ones = tir.const(1, "int16", 2 * ROWS)
        return ones, ones
    twice = [2 * (i // 2) for i in range(2 * ROWS)]
    first, second = (tir.let(tir.shuffle(tir.bits(f, "int16", 2 * ROWS), twice)) for f in factors)
    return first, second


def _times_factor(total: Expr, factors: Halves | None, h: int) -> Expr:
    return total if factors is None else total * factors[h]


def _times(weights: Expr) -> Callable[[Expr], Expr]:
    return lambda x: _maddubs(weights, x)


def _signed_product(weights: Expr) -> Callable[[Expr], Expr]:
    """|w| * (x with the sign of w): one product of two signed bytes fits int16."""
    magnitude = tir.let(_x86("int8x32", "avx2.psign.b", weights, weights))
    return lambda x: _maddubs(magnitude, _x86("int8x32", "avx2.psign.b", x, weights))


def _sum_of_four(products: Expr) -> Expr:
    """int16x32 to int32x8, neighbours added."""
    pairs = tir.bits(products, "int32", 2 * ROWS)
    sixteen = tir.const(16, "int32", 2 * ROWS)
    pairs = tir.let(
        T.shift_right(T.shift_left(pairs, sixteen), sixteen) + T.shift_right(pairs, sixteen)
    )
    even, odd = (tir.shuffle(pairs, [2 * row + i for row in range(ROWS)]) for i in (0, 1))
    return even + odd


def _constant(table: Sequence[int]) -> Expr:
    """16 bytes as a vector constant."""
    words = [
        int.from_bytes(bytes(v & 255 for v in table[i : i + 4]), "little", signed=True)
        for i in range(0, 16, 4)
    ]
    scalars = [tir.const(word, "int32") for word in words]
    return tir.bits(T.Shuffle(scalars, [0, 1, 2, 3]), "int8", 16)


def _gather(table: Sequence[int], index: Expr, lanes: int) -> Expr:
    """A table in memory, read byte by byte."""
    words, places, values = (tir.scratch(size, "int8") for size in (16, lanes, lanes))
    tir.store(words, 0, _constant(table), 16)
    tir.store(places, 0, tir.bits(index, "int8", lanes), lanes)
    with tir.serial(0, lanes) as i:
        place = tir.cast(tir.load(places, i, 1), "int32")
        tir.store(values, i, tir.load(words, place, 1), 1)
    return tir.let(tir.load(values, 0, lanes))
