"""Token ids to rows of the embedding table."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import f32, full_name, kernel, size, weight
from xpuc.ir.formats import Format, row_bytes


def embed(format: Format, rows: int, k: int, n: int | None, scale: float = 1.0) -> tirx.PrimFunc:
    """tokens i32 (n,) in 0..rows - 1, w uint8 (rows, row_bytes) -> y f32 (n, k), times `scale`."""
    count = size(n, "n")
    tokens = te.placeholder((count,), "int32", "tokens")
    w = te.placeholder((rows, row_bytes(format, k)), "uint8", "w")
    y = te.compute(
        (count, k),
        lambda r, c: weight(format, w, tokens[r], c // format.n, c % format.n) * f32(scale),
        "y",
    )
    name = full_name("embed", n, format.name.lower(), f"{rows}x{k}", float(scale))
    return kernel(name, tokens, w, y)
