"""Packed weights to f32."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import full_name, kernel, weight
from xpuc.ir.formats import Format, row_bytes


def dequantize(format: Format, rows: int, k: int) -> tirx.PrimFunc:
    """w uint8 (rows, row_bytes) -> y f32 (rows, k)."""
    w = te.placeholder((rows, row_bytes(format, k)), "uint8", "w")
    y = te.compute((rows, k), lambda r, c: weight(format, w, r, c // format.n, c % format.n), "y")
    return kernel(full_name("dequantize", rows, format.name.lower(), k), w, y)
