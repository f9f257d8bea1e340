"""A range of an activation's columns, as an activation of its own."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import full_name, kernel, size


def take_columns(d: int, start: int, width: int, n: int | None) -> tirx.PrimFunc:
    """x f32 (n, d) -> y f32 (n, width): the columns from `start`."""
    rows = size(n, "n")
    x = te.placeholder((rows, d), "float32", "x")
    y = te.compute((rows, width), lambda r, c: x[r, start + c], "y")
    return kernel(full_name("take_columns", n, d, start, width), x, y)
