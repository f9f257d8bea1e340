"""Activations quantised to q8a: 8 bits a value, one scale for every 16 columns."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import Expr, f32, full_name, kernel, size
from xpuc.ir.activation import Q8_BLOCK, Q8_HALF

_SMALLEST_NORMAL = 1.1754943508222875e-38


def quantize(k: int, n: int | None) -> tirx.PrimFunc:
    """x f32 (n, k) -> xq int8 (b, n, 32), xd, xs f32 (b, n, 2), xt f32 (b, n), with b = k / 32.

    Of each half block of 16 columns: xd = max|x| / 127, xq = x * (1 / xd) to nearest even, xs = xd
    times the sum of xq; xt is the sum of both xs. All xq are zero where xd is zero, below normal
    range, or not finite; a NaN anywhere in the half makes xd NaN, so that it is not lost.
    """
    count, blocks = size(n, "n"), k // Q8_BLOCK
    halves = (blocks, count, 2)
    x = te.placeholder((count, k), "float32", "x")

    def magnitude(r: Expr, c: Expr) -> Expr:
        # Compared as integers, the magnitude bits of a NaN are the largest of all.
        return tirx.reinterpret("int32", x[r, c]) & tirx.const(0x7FFFFFFF, "int32")

    i = te.reduce_axis((0, Q8_HALF), "i")
    largest = te.compute(
        halves,
        lambda b, r, h: te.max(magnitude(r, b * Q8_BLOCK + h * Q8_HALF + i), axis=i),
        "largest",
    )
    xd = te.compute(
        halves, lambda b, r, h: tirx.reinterpret("float32", largest[b, r, h]) / f32(127), "xd"
    )
    inverse = te.compute(
        halves,
        lambda b, r, h: tirx.Select(
            xd[b, r, h] >= f32(_SMALLEST_NORMAL), f32(1) / xd[b, r, h], f32(0)
        ),
        "inverse",
    )
    xq = te.compute(
        (blocks, count, Q8_BLOCK),
        lambda b, r, i: te.if_then_else(
            inverse[b, r, i // Q8_HALF] > f32(0),
            tirx.Cast("int8", te.nearbyint(x[r, b * Q8_BLOCK + i] * inverse[b, r, i // Q8_HALF])),
            tirx.const(0, "int8"),
        ),
        "xq",
    )
    j = te.reduce_axis((0, Q8_HALF), "j")
    sums = te.compute(
        halves,
        lambda b, r, h: te.sum(tirx.Cast("int32", xq[b, r, h * Q8_HALF + j]), axis=j),
        "sums",
    )
    xs = te.compute(halves, lambda b, r, h: xd[b, r, h] * tirx.Cast("float32", sums[b, r, h]), "xs")
    xt = te.compute((blocks, count), lambda b, r: xs[b, r, 0] + xs[b, r, 1], "xt")
    return kernel(full_name("quantize", n, k), x, xq, xd, xs, xt)
