"""Sub-blocks of packed weights in a thread's registers: what every product of a GPU decodes.

One thread decodes 32 columns of one row to eight words of four int8, as `dp4a` takes them, and to
the numbers that scale them; which instructions that takes follows from the format's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.layouts import UNITS, elements
from xpuc.schedules.cuda.tir import Buffer, Expr, T
from xpuc.schedules.packed import COLUMNS, Packed
from xpuc.schedules.packed.bits import PIECES

WORDS = COLUMNS // 4  # of a sub-block

Halves = tuple[Expr, Expr]  # of the first 16 columns and of the others; one object if equal


@dataclass(frozen=True)
class SubBlock:
    """32 columns of a row: `words[v]` holds columns 4v to 4v + 3 as int8.

    A weight is `scale * q + shift`, f32; shift None where it is zero.
    """

    words: tuple[Expr, ...]
    scale: Halves
    shift: Halves | None


def sub_block(facts: Packed, planes: Mapping[str, Buffer], index: Expr) -> SubBlock:
    """Load and decode sub-block `index`, counted over all rows.

    planes: by name, one-dimensional, as `layouts.planes` has them.
    """
    per_block = facts.columns // COLUMNS
    block = index if per_block == 1 else tir.let(index // per_block)
    units = words(facts, planes, index)
    d = tir.let(tir.cast(tir.load(planes["d"], block), "float32"))
    scales, mins = _factors(facts, planes, index)
    scale = _times(d, scales)
    shift: Halves | None = None
    if "m" in planes:
        m = tir.let(tir.cast(tir.load(planes["m"], block), "float32"))
        shift = _times(m, mins)
    elif facts.offset:
        offset = tir.const(-facts.offset, "float32")
        shift = _each(scale, lambda s: tir.let(s * offset))
    return SubBlock(units, scale, shift)


def words(facts: Packed, planes: Mapping[str, Buffer], index: Expr) -> tuple[Expr, ...]:
    """The elements of sub-block `index` as `SubBlock.words` has them."""
    units: list[Expr] = []
    for name, count in zip(("qs", "top"), UNITS[facts.bits], strict=False):
        for first in range(0, count, 4):
            n = min(4, count - first)
            loaded = tir.registers(n, "uint32")
            tir.store(loaded, 0, tir.load(planes[name], index * count + first, n), n)
            units += [loaded[i] for i in range(n)]
    if facts.bits == 8:
        return tuple(units)
    if facts.values is not None:
        return _looked_up(facts.values, units)
    return tuple(_joined(units, pieces) for pieces in PIECES[facts.bits])


def _joined(units: Sequence[Expr], pieces: Sequence[tuple[int, int, int]]) -> Expr:
    """Four elements of a vector side by side, their pieces next to each other."""
    value, taken = None, 0
    for byte, low, count in pieces:
        mask = tir.const(((1 << count) - 1 << taken) * 0x01010101, "uint32")
        piece = _shifted(units[byte], low - taken) & mask
        value = piece if value is None else value | piece
        taken += count
    return tir.let(value)


def _shifted(word: Expr, by: int) -> Expr:
    return T.shift_right(word, tir.const(by, "uint32")) if by else word


def _looked_up(table: Sequence[int], units: Sequence[Expr]) -> tuple[Expr, ...]:
    """The table's bytes for the nibbles of 4 units, as `layouts` has them: those of columns 4v are
    the lower half of unit v, those 16 on its upper half.

    A byte permutation takes 4 nibbles of a word as indices of 8 bytes; the fourth bit of an index
    chooses between those of the lower and of the upper half of the table.
    """
    words = [_word(table[4 * i : 4 * i + 4]) for i in range(4)]
    low: list[Expr] = []
    high: list[Expr] = []
    for unit in units:
        index = tir.let(unit & tir.const(0x77777777, "uint32"))
        # An index of 8 and more takes byte i of `upper`, which permute_bytes counts from 4 on.
        fourth = T.shift_right(unit & tir.const(0x88888888, "uint32"), tir.const(1, "uint32"))
        choice = tir.let(fourth | tir.const(0x32103210, "uint32"))
        for found, start in ((low, 0), (high, 16)):
            four = tir.let(_shifted(index, start))
            lower = tir.permute_bytes(words[0], words[1], four)
            upper = tir.permute_bytes(words[2], words[3], four)
            found.append(tir.let(tir.permute_bytes(lower, upper, _shifted(choice, start))))
    return (*low, *high)


def _word(values: Sequence[int]) -> Expr:
    return tir.const(sum((v & 255) << 8 * i for i, v in enumerate(values)), "uint32")


def _factors(
    facts: Packed, planes: Mapping[str, Buffer], index: Expr
) -> tuple[Halves | None, Halves | None]:
    """The integers that `d` and `m` are multiplied with, as f32."""
    if "scales" not in planes:
        return None, None
    scales = planes["scales"]
    if str(scales.dtype) == "uint16":  # Q2_K: second scale, first, first min, second, 4 bits each
        word = tir.let(tir.cast(tir.load(scales, index), "uint32"))
        second, first, first_min, second_min = (
            tir.let(tir.cast(_shifted(word, 4 * i) & tir.const(15, "uint32"), "float32"))
            for i in range(4)
        )
        return (first, second), (first_min, second_min)
    (field,) = (f for f in facts.planes if f.name == "scales")
    if field.per_block == 2 * facts.columns // COLUMNS:
        return (_float(scales, 2 * index), _float(scales, 2 * index + 1)), None
    factor = _float(scales, index)
    if "mins" not in planes:
        return (factor, factor), None
    min_factor = _float(planes["mins"], index)
    return (factor, factor), (min_factor, min_factor)


def _float(plane: Buffer, index: Expr) -> Expr:
    return tir.let(tir.cast(tir.load(plane, index), "float32"))


def _times(number: Expr, factors: Halves | None) -> Halves:
    if factors is None:
        return number, number
    return _each(factors, lambda f: tir.let(number * f))


def _each(halves: Halves, change: Callable[[Expr], Expr]) -> Halves:
    first = change(halves[0])
    return first, first if halves[0] is halves[1] else change(halves[1])


def columns(sub: SubBlock) -> list[Expr]:
    """The 32 weights of a sub-block in f32."""
    result = []
    for c in range(COLUMNS):
        word, half = tir.bits(sub.words[c // 4], "int32"), c // 16
        left, right = tir.const(24 - 8 * (c % 4), "int32"), tir.const(24, "int32")
        q = tir.cast(T.shift_right(T.shift_left(word, left), right), "float32")
        scale = sub.scale[half]
        result.append(q * scale if sub.shift is None else tir.fma(q, scale, sub.shift[half]))
    return result


class Fragment:
    """A sub-block as it lies in memory, in registers: loaded at one place, decoded at another."""

    def __init__(self, facts: Packed) -> None:
        self.facts = facts
        self._per_block = facts.columns // COLUMNS
        self._counts = {name: n // self._per_block for name, _, n in elements(facts)}
        self._registers = {
            name: tir.registers(max(1, self._counts[name]), dtype)
            for name, dtype, _ in elements(facts)
        }

    def load(self, planes: Mapping[str, Buffer], index: Expr) -> None:
        """Load sub-block `index` of planes as `sub_block` takes them."""
        for name, count in self._counts.items():
            into = self._registers[name]
            if count == 0:  # one for all sub-blocks of a block
                tir.store(into, 0, tir.load(planes[name], index // self._per_block))
            for first in range(0, count, 4):
                n = min(4, count - first)
                tir.store(into, first, tir.load(planes[name], index * count + first, n), n)

    def decode(self) -> SubBlock:
        """What was loaded last."""
        return sub_block(self.facts, self._registers, 0)
