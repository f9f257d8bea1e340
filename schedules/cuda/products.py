"""Rows of packed weights times a few activations: what every mat-vec of a GPU is made of.

A warp multiplies whole rows: lane l takes sub-blocks l, l + 32, ... of each. A sub-block is decoded
once and multiplied with every activation, and each activation's sums run in an order of their own,
so that a row's bits do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.blocks import SubBlock, columns, sub_block
from xpuc.schedules.cuda.layouts import planes
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T
from xpuc.schedules.packed import COLUMNS, Packed, packed

TILE = 8  # activations that a kernel for any number of them takes at a time
MOST_ROWS = 16  # activations that a kernel keeps sums of in registers


@dataclass(frozen=True)
class Weight:
    """A packed matrix as an operand of a kernel."""

    format: str
    rows: int

    def declare(self, name: str, k: int) -> Matrix:
        """Declare its planes as the next arguments of the kernel."""
        buffers = {
            plane.name: tir.arg(f"{name}_{plane.name}", (plane.size,), plane.dtype)
            for plane in planes(self.format, self.rows, k)
        }
        return Matrix(packed(self.format), self.rows, k, buffers)


@dataclass(frozen=True)
class Matrix:
    """A packed matrix (rows, k) inside a kernel."""

    facts: Packed
    rows: int
    k: int
    planes: Mapping[str, Buffer]


@dataclass(frozen=True)
class Stream:
    """A row that a warp reads; one past the last is read as the last."""

    matrix: Matrix
    row: Expr


@dataclass(frozen=True)
class Rows:
    """The activations a block takes: `count` of them from `first` on, of `n`."""

    n: int | Expr
    count: int
    first: Expr = 0

    def at(self, c: int) -> Expr:
        """The c-th; the last of all where there are fewer."""
        return c if isinstance(self.n, int) else tir.minimum(self.first + c, self.n - 1)

    @contextmanager
    def when_there(self, c: int) -> Iterator[Expr]:
        """Inside, which activation the c-th is, if there are so many."""
        with nullcontext() if isinstance(self.n, int) else tir.when(self.first + c < self.n):
            yield self.first + c


class Activation(Protocol):
    """Activations of k columns, of which a lane takes one sub-block at a time."""

    def part(self, matrix: Matrix, index: Expr) -> Any:
        """The weights of sub-block `index` of all the matrix's, as `add` multiplies them."""

    def add(self, acc: Buffer, parts: Sequence[Any], rows: Rows, step: Expr) -> None:
        """acc[i * rows.count + c] += parts[i] times sub-block `step` of activation c."""


@dataclass(frozen=True)
class Q8:
    """Quantised activations (docs/formats.md): xq (b, n, 32), xd and xs (b, n, 2), xt (b, n).

    The integer products of a half block are exact; what follows is, for scales s and shifts m of
    the weights, acc = fma(s, xd0 * i0 + xd1 * i1, acc), then fma(m, xt, acc), or both by halves.
    """

    xq: Buffer
    xd: Buffer
    xs: Buffer
    xt: Buffer

    @staticmethod
    def declare(n: int | Expr, k: int) -> Q8:
        """Declare the four tensors as the next arguments of the kernel."""
        b = k // COLUMNS
        xq = tir.arg("xq", (b, n, COLUMNS), "int8")
        xd, xs = (tir.arg(name, (b, n, 2), "float32") for name in ("xd", "xs"))
        return Q8(xq, xd, xs, tir.arg("xt", (b, n), "float32"))

    def part(self, matrix: Matrix, index: Expr) -> SubBlock:
        """See Activation."""
        assert matrix.facts.is_quantised, f"{matrix.facts.name} takes f32 activations"
        return sub_block(matrix.facts, matrix.planes, index)

    def add(self, acc: Buffer, parts: Sequence[SubBlock], rows: Rows, step: Expr) -> None:
        """See Activation."""
        for c in range(rows.count):
            at = (step, tir.let(rows.at(c)))
            words = tir.registers(8, "uint32")
            for first in (0, 4):
                part = tir.load(self.xq, (*at, 4 * first), 16)
                tir.store(words, first, tir.bits(part, "uint32x4"), 4)
            xd = tir.let(tir.load(self.xd, (*at, 0), 2))
            for i, sub in enumerate(parts):
                total = self._joined(acc[i * rows.count + c], sub, (words, xd), at)
                tir.store(acc, i * rows.count + c, total)

    def _joined(
        self, total: Expr, sub: SubBlock, x: tuple[Buffer, Expr], at: tuple[Expr, Expr]
    ) -> Expr:
        words, xd = x
        integers = [_dot(sub.words[v : v + 4], [words[v + i] for i in range(4)]) for v in (0, 4)]
        first = tir.element(xd, 0) * integers[0]
        if sub.scale[0] is sub.scale[1]:
            total = tir.fma(sub.scale[0], tir.fma(tir.element(xd, 1), integers[1], first), total)
        else:
            total = tir.fma(sub.scale[0], first, total)
            total = tir.fma(sub.scale[1], tir.element(xd, 1) * integers[1], total)
        if sub.shift is None:
            return total
        if sub.shift[0] is sub.shift[1]:
            return tir.fma(sub.shift[0], tir.load(self.xt, at), total)
        sums = tir.let(tir.load(self.xs, (*at, 0), 2))
        for half in range(2):
            total = tir.fma(sub.shift[half], tir.element(sums, half), total)
        return total


def _dot(a: Sequence[Expr], b: Sequence[Expr]) -> Expr:
    total: Expr = tir.const(0, "int32")
    for x, y in zip(a, b, strict=True):
        total = tir.dp4a(x, y, total)
    return tir.let(tir.cast(total, "float32"))


@dataclass(frozen=True)
class F32:
    """Plain activations x (n, k), multiplied in the order of their columns."""

    x: Buffer

    @staticmethod
    def declare(n: int | Expr, k: int) -> F32:
        """Declare the tensor as the next argument of the kernel."""
        return F32(tir.arg("x", (n, k), "float32"))

    def part(self, matrix: Matrix, index: Expr) -> list[Expr]:
        """See Activation."""
        return floats(matrix, index)

    def add(self, acc: Buffer, parts: Sequence[Sequence[Expr]], rows: Rows, step: Expr) -> None:
        """See Activation."""
        width = len(parts[0])
        for c in range(rows.count):
            row = tir.let(rows.at(c))
            for first in range(0, width, 4):
                x = tir.let(tir.load(self.x, (row, step * width + first), 4))
                for i, part in enumerate(parts):
                    total: Expr = acc[i * rows.count + c]
                    for lane in range(4):
                        total = tir.fma(part[first + lane], tir.element(x, lane), total)
                    tir.store(acc, i * rows.count + c, total)


ACTIVATIONS: dict[str, type[Q8] | type[F32]] = {"q8": Q8, "f32": F32}


def floats(matrix: Matrix, index: Expr) -> list[Expr]:
    """The weights that a lane takes at a time in f32: `lane_columns` from index times that on."""
    if matrix.facts.is_quantised:
        return columns(sub_block(matrix.facts, matrix.planes, index))
    width = lane_columns(matrix.facts)
    loaded = tir.registers(width, str(matrix.planes["w"].dtype))
    tir.store(loaded, 0, tir.load(matrix.planes["w"], index * width, width), width)
    if matrix.facts.name != "BF16":
        return [tir.let(tir.cast(loaded[i], "float32")) for i in range(width)]
    words = [tir.cast(loaded[i], "uint32") for i in range(width)]
    shift = tir.const(16, "uint32")
    return [tir.let(tir.bits(T.shift_left(word, shift), "float32")) for word in words]


def lane_columns(facts: Packed) -> int:
    """Columns a lane takes at a time: a sub-block, or 16 bytes of floats."""
    return COLUMNS if facts.is_quantised else 16 // facts.nbytes


def row_sums(
    streams: Sequence[Stream], x: Activation, rows: Rows, lane: Expr, ahead: int = 1
) -> list[list[Expr]]:
    """The product of each stream with each activation; every lane of the warp has all of them.

    A lane takes a sub-block a turn; the weights of `ahead` turns are loaded before the first of
    them is used.
    """
    first = streams[0].matrix
    steps = first.k // lane_columns(first.facts)
    starts = [tir.let(tir.minimum(s.row, s.matrix.rows - 1) * steps) for s in streams]
    acc = tir.registers(len(streams) * rows.count, "float32")
    for i in range(len(streams) * rows.count):
        tir.store(acc, i, tir.const(0.0, "float32"))

    def parts(step: Expr) -> list[Any]:
        return [x.part(s.matrix, at + step) for s, at in zip(streams, starts, strict=True)]

    groups = steps // (WARP * ahead) if ahead > 1 else 0
    if groups:
        with tir.serial(0, groups) as group:
            taken = [tir.let((group * ahead + i) * WARP + lane) for i in range(ahead)]
            for step, loaded in [(step, parts(step)) for step in taken]:
                x.add(acc, loaded, rows, step)
    if groups * ahead * WARP < steps:
        with tir.serial(groups * ahead, -(-steps // WARP)) as turn:
            step = tir.let(turn * WARP + lane)
            with tir.when(step < steps):
                x.add(acc, parts(step), rows, step)
    return [
        [tir.warp_reduce(acc[i * rows.count + c], "sum") for c in range(rows.count)]
        for i in range(len(streams))
    ]
