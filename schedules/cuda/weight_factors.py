"""Packed weights as the first factor of a warpgroup's products: f16 in the registers of its lanes.

A lane decodes sub-blocks of the rows it holds and hands them on, so that decoded weights never are
in memory. The order of a sum's columns is free, so it is the lanes': in a step of 128 columns a
lane of four has a sub-block of 32 columns of its own, and gives 4 of them to each product of 16.
The second factor must be in that order: `column_of` says it.
"""

from __future__ import annotations

from typing import Protocol

from xpuc.schedules.cuda import hopper, tir
from xpuc.schedules.cuda.blocks import Fragment
from xpuc.schedules.cuda.products import Matrix
from xpuc.schedules.cuda.tir import Expr, T, Threads
from xpuc.schedules.packed import COLUMNS

STEP = 4 * COLUMNS  # columns: a sub-block for each lane of four
PARTS = STEP // hopper.K  # products of a step


def column_of(lane: int, i: int) -> int:
    """Where a product of 16 columns has the i-th of the 4 that a lane of four gives."""
    return lane * 2 + i % 2 + i // 2 * 8


class Share:
    """What a lane has of the 64 rows of a matrix that its warpgroup multiplies: two of them, of
    which it takes every fourth sub-block. Rows and sub-blocks past the last are read as the last.
    """

    def __init__(self, matrix: Matrix, first: Expr, threads: Threads) -> None:
        self.sub_blocks, self.lane = matrix.k // COLUMNS, threads.lane
        kind = _Quantised if matrix.facts.is_quantised else _Floats
        self.rows: list[_Part] = [kind(matrix) for _ in range(2)]
        places = (first + hopper.position(threads, 2 * half)[0] for half in range(2))
        self.starts = [
            tir.let(tir.minimum(place, matrix.rows - 1) * self.sub_blocks) for place in places
        ]

    def load(self, step: Expr) -> None:
        """Start loading a step's."""
        place = tir.let(tir.minimum(step * 4 + self.lane % 4, self.sub_blocks - 1))
        for row, start in zip(self.rows, self.starts, strict=True):
            row.load(start + place)

    def decode(self) -> None:
        """Decode what was loaded last, as far as all of a sub-block has in common."""
        for row in self.rows:
            row.decode()

    def operand(self, part: int) -> list[Expr]:
        """The words of wgmma's first factor with its columns 4 `part` to 4 `part` + 3."""
        (a, c), (b, d) = (row.four(part) for row in self.rows)
        return [a, b, c, d]


class _Part(Protocol):
    """A sub-block of one row."""

    def load(self, index: Expr) -> None: ...
    def decode(self) -> None: ...
    def four(self, part: int) -> tuple[Expr, Expr]:
        """Columns 4 `part` to 4 `part` + 3 in f16, two a word."""


class _Quantised:
    """Integers below 256 become f16 by three operations for two: as the low bits of 1024 + q, of
    which 1024 and the format's offset are taken off exactly, then scaled."""

    def __init__(self, matrix: Matrix) -> None:
        self.planes, self.fragment = matrix.planes, Fragment(matrix.facts)
        facts = matrix.facts
        self.is_signed = facts.bits == 8 or facts.values is not None
        self.has_minimum = "m" in matrix.planes
        offset = 128 if self.is_signed else 0 if self.has_minimum else facts.offset
        self.zero = tir.const((_F16_1024 + offset) * 0x10001, "uint32")
        self.words = tir.registers(COLUMNS // 4, "uint32")
        self.scale, self.shift = (tir.registers(2, "uint32") for _ in range(2))

    def load(self, index: Expr) -> None:
        self.fragment.load(self.planes, index)

    def decode(self) -> None:
        sub = self.fragment.decode()
        for i, word in enumerate(sub.words):
            signed = word ^ tir.const(0x80808080, "uint32")
            tir.store(self.words, i, signed if self.is_signed else word)
        self.halves = 1 if sub.scale[0] is sub.scale[1] else 2
        for half in range(self.halves):
            tir.store(self.scale, half, _twice(sub.scale[half]))
            if sub.shift is not None:
                tir.store(self.shift, half, _twice(sub.shift[half]))

    def four(self, part: int) -> tuple[Expr, Expr]:
        bytes_of_1024 = tir.const(_F16_1024 // 256 * 0x01010101, "uint32")
        first, second = (
            self._scaled(
                tir.permute_bytes(self.words[part], bytes_of_1024, selector),
                part * self.halves // 8,
            )
            for selector in (tir.const(0x4140, "uint32"), tir.const(0x4342, "uint32"))
        )
        return first, second

    def _scaled(self, raised: Expr, half: int) -> Expr:
        q = _f16x2("sub", raised, self.zero)
        if not self.has_minimum:
            return _f16x2("mul", q, self.scale[half])
        return _f16x2("fma", q, self.scale[half], self.shift[half])


_MINUS_0 = 0x8000  # in f16
_F16_1024 = 0x6400  # its bits; the next 1023 are whole numbers


def _twice(value: Expr) -> Expr:
    return _halves(value, value)


class _Floats:
    def __init__(self, matrix: Matrix) -> None:
        self.plane, self.is_bf16 = matrix.planes["w"], matrix.facts.name == "BF16"
        assert matrix.facts.nbytes == 2, f"{matrix.facts.name} does not fit f16"
        self.raw, self.words = (tir.registers(COLUMNS // 2, "uint32") for _ in range(2))

    def load(self, index: Expr) -> None:
        for first in range(0, COLUMNS, 8):
            loaded = tir.load(self.plane, index * COLUMNS + first, 8)
            tir.store(self.raw, first // 2, tir.bits(loaded, "uint32x4"), 4)

    def decode(self) -> None:
        for i in range(COLUMNS // 2):
            word = self.raw[i]
            tir.store(self.words, i, _halves_of_bf16(word) if self.is_bf16 else word)

    def four(self, part: int) -> tuple[Expr, Expr]:
        nothing = tir.const(_MINUS_0 * 0x10001, "uint32")  # so that these are other registers
        first, second = (_f16x2("add", self.words[2 * part + i], nothing) for i in range(2))
        return first, second


def _halves_of_bf16(word: Expr) -> Expr:
    low = T.shift_left(word, tir.const(16, "uint32"))
    high = word & tir.const(0xFFFF0000, "uint32")
    return _halves(tir.bits(low, "float32"), tir.bits(high, "float32"))


def _halves(low: Expr, high: Expr) -> Expr:
    """Two f32 rounded to f16, in a uint32 word."""
    word = T.cuda.func_call("xpuc_halves", low, high, source_code=_HALVES, return_type="uint32")
    return tir.let(word)


_HALVES = """
__device__ __forceinline__ unsigned xpuc_halves(float low, float high) {
  half2 both = __floats2half2_rn(low, high);
  return *(unsigned*)&both;
}
"""


def _f16x2(operation: str, *words: Expr) -> Expr:
    """`add`, `sub`, `mul` or `fma` of two f16 at a time in uint32 words, each rounded once."""
    result = tir.registers(1, "uint32")
    T.evaluate(T.ptx[f"{operation}.rn.f16x2"](result[0], *words))
    return tir.let(result[0])
