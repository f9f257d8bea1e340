"""Activations of prompts with one scale for 256 columns, which integer products can be summed over.

q8a has a scale for every 16 columns (quantize.py). Multiplying sums of 16 products by it takes more
instructions than int8 saves, so a prompt's rows are quantised once more, as llama.cpp does for the
K formats on a CPU: a group's scale is the largest of its halves'.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK, Q8_HALF
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.products import Q8
from xpuc.schedules.cuda.quantize import SMALLEST_NORMAL
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T
from xpuc.schedules.cuda.widen import GROUP

BLOCKS = GROUP // Q8_BLOCK  # of a group
DIGIT = 64  # what the upper digit of a sum of 32 codes counts
_LANE = GROUP // WARP  # columns a lane takes
_WARPS = 4


@dataclass(frozen=True)
class Grouped:
    """An activation (n, k): `codes` int8 (n, k), the `scale` of each group f32 (k / 256, n).

    `sums` f16 (k / 256, n, 16) are exact: of each 32 codes of a group their sum's lower digit,
    -32 to 31, then of each the rest, a multiple of 64.
    """

    codes: Buffer
    scale: Buffer
    sums: Buffer

    @staticmethod
    def declare(n: int | Expr, k: int) -> Grouped:
        """Declare the three tensors as the next arguments of the kernel."""
        return Grouped(*(tir.arg(name, shape, dtype) for name, shape, dtype in shapes(n, k)))


def shapes(n: int | Expr, k: int) -> tuple[tuple[str, tuple[int | Expr, ...], str], ...]:
    """Name, shape and dtype of each tensor of a grouped activation."""
    assert k % GROUP == 0, f"{k} columns are not whole groups of {GROUP}"
    groups = k // GROUP
    return (
        ("codes", (n, k), "int8"),
        ("scale", (groups, n), "float32"),
        ("sums", (groups, n, 2 * BLOCKS), "float16"),
    )


def regroup(k: int) -> tirx.PrimFunc:
    """A q8a of k columns, any number of rows, grouped. Arguments: xq, xd, xs, xt, then `Grouped`.

    A warp takes a group of a row. A NaN among the scales makes the group's NaN.
    """

    def body() -> None:
        n = tir.rows_var()
        x, y = Q8.declare(n, k), Grouped.declare(n, k)
        threads = tir.launch(((n + _WARPS - 1) // _WARPS, k // GROUP), _WARPS)
        group = threads.block[1]
        row = tir.let(threads.block[0] * _WARPS + threads.warp)
        with tir.when(row < n):
            _regroup(x, y, row, group, threads.lane)

    return tir.prim_func(f"regroup_{k}", body)


def _regroup(x: Q8, y: Grouped, row: Expr, group: Expr, lane: Expr) -> None:
    block, place = tir.let(lane // (Q8_BLOCK // _LANE)), tir.let(lane % (Q8_BLOCK // _LANE))
    at = tir.let(group * BLOCKS + block)
    own = tir.let(x.xd[at, row, place * _LANE // Q8_HALF])
    # Compared as integers, the magnitude bits of a NaN are the largest of all.
    magnitude = tir.bits(own, "int32") & tir.const(0x7FFFFFFF, "int32")
    scale = tir.let(tir.bits(tir.warp_reduce(magnitude, "max"), "float32"))
    normal = scale >= tir.const(SMALLEST_NORMAL, "float32")
    by = tir.let(T.Select(normal, own / scale, tir.const(0.0, "float32")))
    given, made = tir.registers(_LANE, "int8"), tir.registers(_LANE, "int8")
    tir.store(given, 0, tir.load(x.xq, (at, row, place * _LANE), _LANE), _LANE)
    total = tir.const(0, "int32")
    for i in range(_LANE):
        code = tir.let(tir.round_even(tir.cast(given[i], "float32") * by))
        total = tir.let(total + code)
        tir.store(made, i, tir.cast(code, "int8"))
    tir.store(y.codes, (row, group * GROUP + lane * _LANE), tir.load(made, 0, _LANE), _LANE)
    total = tir.warp_reduce(total, "sum", Q8_BLOCK // _LANE)
    rest = tir.let(tir.floordiv(total + DIGIT // 2, DIGIT) * DIGIT)
    with tir.when(place == 0):
        tir.store(y.sums, (group, row, block), tir.cast(total - rest, "float16"))
        tir.store(y.sums, (group, row, BLOCKS + block), tir.cast(rest, "float16"))
    with tir.when(lane == 0):
        tir.store(y.scale, (group, row), scale)
