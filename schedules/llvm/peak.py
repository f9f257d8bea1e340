"""The most byte products a second that the CPU's instructions give: the roof over many-row kernels.

A loop that touches nothing but registers, of the instructions of `isa.py` in the mix with the
highest rate that a format allows, so that no kernel of packed weights can be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvm import tirx

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.isa import Avx2, Isa, Vnni
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.tir import Expr, T

NAME = "int8_peak"
CHUNKS = 960  # equal shares for most numbers of threads
STEPS = 512  # of the loop, in each chunk
_BYTES = 4 * ROWS  # of a vector


class _Loop(Protocol):
    """`chains` independent sums, each of which a step of the loop adds `products` vectors to."""

    chains: int
    products: int

    def factors(self, x: Expr) -> Sequence[Expr]:
        """What stays in registers, made of int32x8."""

    def step(self, factors: Sequence[Expr], total: Expr) -> Expr:
        """The sum, int32x8, after one step."""


class _Avx2Loop:
    """8 vpmaddubsw, added up in int16, for one vpmaddwd.

    So many products of 4-bit weights fit int16; those of wider weights have to be widened sooner,
    and no kernel adds more. The signed factors are the bytes of the sum itself: were they constant,
    the compiler would take the products out of the loop.
    """

    chains, products = 5, 8  # 13 registers, which leaves enough to compute in

    def factors(self, x: Expr) -> Sequence[Expr]:
        data, low = tir.bits(x, "uint8", _BYTES), tir.const(15, "uint8", _BYTES)
        return [tir.let((data + tir.const(i, "uint8", _BYTES)) & low) for i in range(self.products)]

    def step(self, factors: Sequence[Expr], total: Expr) -> Expr:
        signed = tir.let(tir.bits(total, "int8", _BYTES))
        pairs = tir.tree_sum(
            tir.let(_x86("int16x16", "avx2.pmadd.ub.sw", factor, signed)) for factor in factors
        )
        return total + _x86("int32x8", "avx2.pmadd.wd", pairs, tir.const(1, "int16", 2 * ROWS))


class _VnniLoop:
    """vpdpbusd alone, 256 bits wide as in the kernels."""

    chains, products = 12, 1

    def factors(self, x: Expr) -> Sequence[Expr]:
        return [tir.let(tir.bits(x, "int8", _BYTES))]

    def step(self, factors: Sequence[Expr], total: Expr) -> Expr:
        return _x86("int32x8", "avx512.vpdpbusd.256", total, factors[0], factors[0])


def int8_peak(isa: Isa) -> tirx.PrimFunc | None:
    """The loop in the instructions of `isa`; None where it has no byte products.

    Arguments: x int32 (8,), any values; output sums int32 (CHUNKS, 8). Chain c of chunk i starts at
    x + i + c; the sums are those of a chunk's chains.
    """
    loop = _loop(isa)
    if loop is None:
        return None

    def body() -> None:
        source = tir.arg("x", (ROWS,), "int32")
        sums = tir.arg("sums", (CHUNKS, ROWS), "int32")
        with tir.parallel(0, CHUNKS) as chunk:
            x = tir.let(tir.load(source, 0, ROWS))
            factors = loop.factors(x)
            totals = tir.scratch(loop.chains * ROWS, "int32")
            chains = range(0, loop.chains * ROWS, ROWS)
            for number, chain in enumerate(chains):
                tir.store(totals, chain, x + tir.splat(chunk + number, ROWS), ROWS)
            with tir.serial(0, STEPS):
                for chain in chains:
                    total = tir.let(tir.load(totals, chain, ROWS))
                    tir.store(totals, chain, loop.step(factors, total), ROWS)
            tir.store(
                sums, (chunk, 0), tir.tree_sum(tir.load(totals, c, ROWS) for c in chains), ROWS
            )

    return tir.prim_func(NAME, body)


def operations(isa: Isa) -> int:
    """Of a call of `int8_peak`: a multiplication and an addition for each pair of bytes."""
    loop = _loop(isa)
    return 0 if loop is None else 2 * _BYTES * loop.products * loop.chains * STEPS * CHUNKS


def _loop(isa: Isa) -> _Loop | None:
    if isinstance(isa, Vnni):
        return _VnniLoop()
    return _Avx2Loop() if isinstance(isa, Avx2) else None


def _x86(dtype: str, name: str, *args: Expr) -> Expr:
    return T.call_llvm_pure_intrin(dtype, f"llvm.x86.{name}", *args)
