"""Activations as the second factor of warpgroups' products: f16, in the order of the lanes."""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.cuda import hopper, tir
from xpuc.schedules.cuda.products import F32, Q8
from xpuc.schedules.cuda.tir import WARP, Expr
from xpuc.schedules.cuda.weight_factors import PARTS, STEP, column_of
from xpuc.schedules.packed import COLUMNS

_WARPS = 4


def widened_columns(k: int) -> int:
    """Of the widened activations: whole steps."""
    return -(-k // STEP) * STEP


def widen_rows(k: int, *, activation: str) -> tirx.PrimFunc:
    """The activation of n rows (`q8`: xq, xd, xs, xt; `f32`: x) as f16 (n, widened_columns(k))."""

    def body() -> None:
        n = tir.rows_var()
        x = Q8.declare(n, k) if activation == "q8" else F32.declare(n, k)
        wide = tir.arg("wide", (n, widened_columns(k)), "float16")
        rows = _WARPS * WARP // PARTS
        threads = tir.launch((wide.shape[1] // STEP, (n + rows - 1) // rows), _WARPS)
        step, part = threads.block[0], tir.let(threads.thread % PARTS)
        row = tir.let(threads.block[1] * rows + threads.thread // PARTS)
        with tir.when(row < n):
            values = tir.registers(hopper.K, "float16")
            for lane in range(4):
                of_lane = _four(x, k, row, tir.let(step * 4 + lane), part)
                for i, value in enumerate(of_lane):
                    tir.store(values, column_of(lane, i), tir.cast(value, "float16"))
            for first in (0, 8):
                at = (row, step * STEP + part * hopper.K + first)
                tir.store(wide, at, tir.load(values, first, 8), 8)

    return tir.prim_func(f"widen_rows_{activation}_x{k}", body)


def _four(x: Q8 | F32, k: int, row: Expr, block: Expr, part: Expr) -> list[Expr]:
    """Columns 4 `part` to 4 `part` + 3 of a block of 32, zeros past the last block."""
    blocks = k // COLUMNS
    there = None if k % STEP == 0 else block < blocks
    source = block if there is None else tir.let(tir.minimum(block, blocks - 1))
    if isinstance(x, Q8):
        scale = tir.let(x.xd[source, row, part // 4])
        four = tir.let(tir.load(x.xq, (source, row, part * 4), 4))
        values = [tir.cast(tir.element(four, i), "float32") * scale for i in range(4)]
    else:
        four = tir.let(tir.load(x.x, (row, source * COLUMNS + part * 4), 4))
        values = [tir.element(four, i) for i in range(4)]
    if there is None:
        return values
    return [tir.if_then_else(there, v, tir.const(0.0, "float32")) for v in values]
