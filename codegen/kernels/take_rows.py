"""The rows whose logits are wanted."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import full_name, kernel, size


def take_rows(d: int, n: int | None, m: int | None) -> tirx.PrimFunc:
    """x f32 (n, d), rows i32 (m,) in 0..n - 1 -> y f32 (m, d)."""
    x = te.placeholder((size(n, "n"), d), "float32", "x")
    rows = te.placeholder((size(m, "m"),), "int32", "rows")
    y = te.compute((rows.shape[0], d), lambda r, c: x[rows[r], c], "y")
    return kernel(full_name("take_rows", m, d, f"of_{'n' if n is None else n}"), x, rows, y)
