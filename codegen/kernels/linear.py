"""Rows of activations times a packed matrix."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import full_name, kernel, size, weight
from xpuc.ir.formats import Format, row_bytes


def linear(format: Format, rows: int, k: int, n: int | None) -> tirx.PrimFunc:
    """x f32 (n, k), w uint8 (rows, row_bytes) -> y f32 (n, rows) = x w^T, summed in f32 over k."""
    count = size(n, "n")
    x = te.placeholder((count, k), "float32", "x")
    w = te.placeholder((rows, row_bytes(format, k)), "uint8", "w")
    b = te.reduce_axis((0, k // format.n), "b")
    i = te.reduce_axis((0, format.n), "i")
    y = te.compute(
        (count, rows),
        lambda r, c: te.sum(x[r, b * format.n + i] * weight(format, w, c, b, i), axis=[b, i]),
        "y",
    )
    return kernel(full_name("linear", n, format.name.lower(), f"{rows}x{k}"), x, w, y)
