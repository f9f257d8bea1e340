"""Activations quantised to q8a: 8 bits a value, one scale for every 16 columns.

A scale for every 32 columns, as llama.cpp has it, would save 3 of 40 instructions and double the
error: mean KL of SmolLM2 0.0028 instead of 0.0016, simulated on the float32 forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK, Q8_HALF
from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.tir import Buffer, Expr, T

_SMALLEST_NORMAL = 1.1754943508222875e-38


@dataclass(frozen=True)
class Q8a:
    """The four buffers of one quantised activation of K columns and n rows.

    `xq` int8 (K/32, n, 32); `xd` f32 (K/32, n, 2), the scale of each half block; `xs` f32
    (K/32, n, 2), the scale times the sum of the integers of each half; `xt` f32 (K/32, n), both
    together, the second added by fma.
    """

    xq: Buffer
    xd: Buffer
    xs: Buffer
    xt: Buffer


def q8a_args(k: int, rows: int | Expr) -> Q8a:
    """Declare a q8a of `k` columns as the next four arguments of the kernel."""
    assert k % Q8_BLOCK == 0, f"{k} columns are not whole blocks of {Q8_BLOCK}"
    return Q8a(
        tir.arg("xq", (k // Q8_BLOCK, rows, Q8_BLOCK), "int8"),
        tir.arg("xd", (k // Q8_BLOCK, rows, 2), "float32"),
        tir.arg("xs", (k // Q8_BLOCK, rows, 2), "float32"),
        tir.arg("xt", (k // Q8_BLOCK, rows), "float32"),
    )


def emit_block(values: Sequence[Expr], out: Q8a, block: Expr, row: Expr, lanes: int = 8) -> None:
    """Quantise 32 columns, given as 32 / `lanes` f32 vectors, into block `block` of row `row`.

    Of each half: scale max|x| / 127, inverse as 1 / scale, rounded to nearest even. A half whose
    scale is zero or below the normal range becomes zeros; a NaN anywhere in it makes the scale NaN,
    so it is not lost.
    """
    assert len(values) * lanes == Q8_BLOCK
    middle = len(values) // 2
    sums = []
    for half, part in enumerate((values[:middle], values[middle:])):
        vectors = [tir.let(v) for v in part]
        scale = _scale(vectors, lanes)
        count = _emit_half(vectors, scale, out, (block, row, half), lanes)
        tir.store(out.xd, (block, row, half), scale, 1)
        sums.append((scale, count, tir.let(scale * count)))
        tir.store(out.xs, (block, row, half), sums[half][2], 1)
    scale, count, _ = sums[1]
    tir.store(out.xt, (block, row), tir.fma(scale, count, sums[0][2]), 1)


def _scale(vectors: Sequence[Expr], lanes: int) -> Expr:
    """max|x| / 127."""
    # Compared as integers, the magnitude bits of a NaN are the largest of all.
    bits = [tir.bits(v, "int32", lanes) & tir.const(0x7FFFFFFF, "int32", lanes) for v in vectors]
    while len(bits) > 1:
        bits = [T.max(bits[i], bits[i + 1]) for i in range(0, len(bits), 2)]
    largest = tir.bits(tir.fold_int(bits[0], lanes, "smax"), "float32")
    return tir.let(largest / tir.const(127.0, "float32"))


def _inverse(scale: Expr) -> Expr:
    """1 / scale, or 0 where the scale is zero or below the normal range."""
    normal = scale >= tir.const(_SMALLEST_NORMAL, "float32")
    return tir.let(T.Select(normal, tir.const(1.0, "float32") / scale, tir.const(0.0, "float32")))


def quantize_group(values: Sequence[Expr], lanes: int) -> tuple[Expr, list[Expr]]:
    """q8_0 of the columns of one scale, given as f32 vectors: the scale in f32, int8 vectors.

    As ggml has it: scale max|x| / 127, codes x times its inverse with halves rounded away from
    zero. A NaN makes the scale NaN.
    """
    vectors = [tir.let(v) for v in values]
    scale = _scale(vectors, lanes)
    inverse = tir.splat(_inverse(scale), lanes)
    codes = []
    for vector in vectors:
        name = f"llvm.round.v{lanes}f32"
        rounded = T.call_llvm_pure_intrin(f"float32x{lanes}", name, vector * inverse)
        codes.append(tir.let(tir.cast(tir.cast(rounded, "int32", lanes), "int8", lanes)))
    return scale, codes


def _emit_half(
    vectors: Sequence[Expr], scale: Expr, out: Q8a, place: tuple[Expr, Expr, int], lanes: int
) -> Expr:
    """Store the integers of half `place[2]` of a block; their sum as f32."""
    block, row, half = place
    inverse = _inverse(scale)
    quants = [
        tir.let(tir.cast(T.nearbyint(v * tir.splat(inverse, lanes)), "int32", lanes))
        for v in vectors
    ]
    for i, q in enumerate(quants):
        column = half * Q8_HALF + i * lanes
        tir.store(out.xq, (block, row, column), tir.cast(q, "int8", lanes), lanes)
    return tir.let(tir.cast(tir.fold_int(tir.tree_sum(quants), lanes, "add"), "float32"))


def quantize(k: int, n: int | None, *, lanes: int = 8) -> tirx.PrimFunc:
    """x f32 (n, k) -> q8a."""
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = tir.arg("x", (rows, k), "float32")
        out = q8a_args(k, rows)
        with tir.each_row(rows, k) as row, tir.serial(0, k // Q8_BLOCK) as block:
            starts = range(0, Q8_BLOCK, lanes)
            emit_block(
                [tir.load(x, (row, block * Q8_BLOCK + i), lanes) for i in starts],
                out,
                block,
                row,
                lanes,
            )

    return tir.prim_func(f"quantize_{k}_r{n or 'n'}", body)
