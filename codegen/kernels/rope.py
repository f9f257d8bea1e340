"""Rotary position embedding: the table of a step, and its application to q or k."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import Expr, full_name, kernel, size


def rope_table(n_rot: int, n: int | None, mscale: float = 1.0) -> tirx.PrimFunc:
    """positions i32 (n,), inv_freq f64 (n_rot / 2,) -> f32 (n, n_rot): cos | sin, times `mscale`.

    The angle (radians) is float64: in float32 a position of 100000 is off by half a hundredth.
    """
    count, half = size(n, "n"), n_rot // 2
    positions = te.placeholder((count,), "int32", "positions")
    inv_freq = te.placeholder((half,), "float64", "inv_freq")

    def value(r: Expr, c: Expr) -> Expr:
        angle = tirx.Cast("float64", positions[r]) * inv_freq[c % half]
        turned = te.if_then_else(c < half, te.cos(angle), te.sin(angle))
        return tirx.Cast("float32", turned * tirx.const(mscale, "float64"))

    table = te.compute((count, n_rot), value, "table")
    return kernel(full_name("rope_table", n, n_rot, float(mscale)), positions, inv_freq, table)


def rope(heads: int, head_dim: int, n_rot: int, n: int | None, pairing: str) -> tirx.PrimFunc:
    """x f32 (n, heads * head_dim), table f32 (n, n_rot) -> y of x's shape.

    The first n_rot columns of each head are turned in pairs: `norm` (2 j, 2 j + 1), `neox`
    (j, j + n_rot / 2). The others pass unchanged.
    """
    assert pairing in ("norm", "neox"), pairing
    count, half = size(n, "n"), n_rot // 2
    x = te.placeholder((count, heads * head_dim), "float32", "x")
    table = te.placeholder((count, n_rot), "float32", "table")

    def value(r: Expr, c: Expr) -> Expr:
        e = c % head_dim  # column of the head
        if pairing == "norm":
            pair, is_first, step = e // 2, e % 2 == 0, 1
        else:
            pair, is_first, step = e % half, e < half, half
        cos, sin = table[r, pair], table[r, half + pair]
        turned = te.if_then_else(
            is_first, x[r, c] * cos - x[r, c + step] * sin, x[r, c] * cos + x[r, c - step] * sin
        )
        return turned if n_rot == head_dim else te.if_then_else(e < n_rot, turned, x[r, c])

    y = te.compute(x.shape, value, "y")
    return kernel(full_name("rope", n, pairing, f"{heads}x{head_dim}", n_rot), x, table, y)
