"""Activations quantised to q8a on a GPU: a warp takes a block of 32 columns, a lane one of them."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from xpuc.artifact import KV_GROUP
from xpuc.ir.activation import Q8_BLOCK, Q8_HALF
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import Buffer, Expr, T

SMALLEST_NORMAL = 1.1754943508222875e-38
_WARPS = 4


@dataclass(frozen=True)
class Q8a:
    """The four buffers of a quantised activation, as docs/formats.md defines them."""

    xq: Buffer
    xd: Buffer
    xs: Buffer
    xt: Buffer

    @staticmethod
    def declare(k: int, rows: int | Expr) -> Q8a:
        """Declare a q8a of `k` columns as the next four arguments of the kernel."""
        assert k % Q8_BLOCK == 0, f"{k} columns are not whole blocks of {Q8_BLOCK}"
        b = k // Q8_BLOCK
        return Q8a(
            tir.arg("xq", (b, rows, Q8_BLOCK), "int8"),
            tir.arg("xd", (b, rows, 2), "float32"),
            tir.arg("xs", (b, rows, 2), "float32"),
            tir.arg("xt", (b, rows), "float32"),
        )

    def store_block(self, value: Expr, block: Expr, row: Expr, lane: Expr) -> None:
        """Quantise 32 columns, one in each lane; all lanes of the warp take part.

        Of each half: scale max|x| / 127, inverse as 1 / scale, rounded to nearest even. A half
        whose scale is zero or below the normal range becomes zeros; a NaN anywhere in it makes the
        scale NaN, so it is not lost.
        """
        scale, inverse = _scale(value, Q8_HALF)
        quant = tir.let(tir.round_even(value * inverse))
        tir.store(self.xq, (block, row, lane), tir.cast(quant, "int8"))
        count = tir.let(tir.cast(tir.warp_reduce(quant, "sum", Q8_HALF), "float32"))
        sums = tir.let(scale * count)
        with tir.when(lane % Q8_HALF == 0):
            half = lane // Q8_HALF
            tir.store(self.xd, (block, row, half), scale)
            tir.store(self.xs, (block, row, half), sums)
        others = [tir.let(tir.shuffle_xor(v, Q8_HALF)) for v in (scale, count)]
        with tir.when(lane == 0):
            tir.store(self.xt, (block, row), tir.fma(others[0], others[1], sums))


def _scale(value: Expr, lanes: int) -> tuple[Expr, Expr]:
    """max|x| / 127 of groups of lanes, and its inverse, 0 where it is below the normal range."""
    # Compared as integers, the magnitude bits of a NaN are the largest of all.
    magnitude = tir.bits(value, "int32") & tir.const(0x7FFFFFFF, "int32")
    largest = tir.bits(tir.warp_reduce(magnitude, "max", lanes), "float32")
    scale = tir.let(largest / tir.const(127.0, "float32"))
    normal = scale >= tir.const(SMALLEST_NORMAL, "float32")
    one, zero = tir.const(1.0, "float32"), tir.const(0.0, "float32")
    return scale, tir.let(T.Select(normal, one / scale, zero))


def quantize_group(value: Expr) -> tuple[Expr, Expr]:
    """q8_0 of the columns of one scale, one in each lane of a warp: f16 scale, int8 code.

    As ggml has it: scale max|x| / 127, codes x times its inverse with halves rounded away from
    zero. A NaN makes the scale NaN.
    """
    scale, inverse = _scale(value, KV_GROUP)
    code = tir.round_away(value * inverse)
    return tir.cast(scale, "float16"), tir.cast(code, "int8")


def quantize(k: int, n: int | None) -> tirx.PrimFunc:
    """x f32 (n, k) -> q8a."""
    rows, blocks = (tir.rows_var() if n is None else n), k // Q8_BLOCK

    def body() -> None:
        x = tir.arg("x", (rows, k), "float32")
        out = Q8a.declare(k, rows)
        threads = tir.launch((-(-blocks // _WARPS), rows), _WARPS)
        block, row = tir.let(threads.block[0] * _WARPS + threads.warp), threads.block[1]
        with tir.when(block < blocks):
            value = tir.let(tir.load(x, (row, block * Q8_BLOCK + threads.lane)))
            out.store_block(value, block, row, threads.lane)

    return tir.prim_func(f"quantize_{k}_r{n or 'n'}", body)
