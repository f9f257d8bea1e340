"""Root mean square normalisation, without its weight."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import f32, full_name, kernel, size


def rms_norm(d: int, n: int | None, eps: float, groups: int = 1) -> tirx.PrimFunc:
    """x f32 (n, groups * d) -> y of its shape: x / sqrt(mean(x^2) + eps) by group of d columns."""
    count = size(n, "n")
    x = te.placeholder((count, groups * d), "float32", "x")
    j = te.reduce_axis((0, d), "j")
    squares = te.compute(
        (count, groups), lambda r, g: te.sum(x[r, g * d + j] * x[r, g * d + j], axis=j), "squares"
    )
    factor = te.compute(
        (count, groups), lambda r, g: f32(1) / te.sqrt(squares[r, g] / f32(d) + f32(eps)), "factor"
    )
    y = te.compute(x.shape, lambda r, c: x[r, c] * factor[r, c // d], "y")
    return kernel(full_name("rms_norm", n, f"{groups}x{d}", float(eps)), x, y)
