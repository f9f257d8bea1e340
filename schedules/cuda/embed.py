"""Token embeddings on a GPU, gathered from packed weights."""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.elementwise import each
from xpuc.schedules.cuda.products import Weight, floats, lane_columns
from xpuc.schedules.packed import packed


def embed(weight: Weight, k: int, n: int | None, scale: float) -> tirx.PrimFunc:
    """The rows of a packed matrix that the tokens name, times `scale`.

    Arguments: tokens int32 (n,), each in [0, rows), or -1, no token, which gives some row; the
    weight's planes; output y f32 (n, k).
    """
    rows = tir.rows_var() if n is None else n
    width = lane_columns(packed(weight.format))
    steps = k // width

    def body() -> None:
        tokens = tir.arg("tokens", (rows,), "int32")
        matrix = weight.declare("w", k)
        y = tir.arg("y", (rows, k), "float32")
        with each(rows, steps) as (row, step):
            part = floats(matrix, tir.let(tir.maximum(tokens[row], 0) * steps + step))
            for first in range(0, width, 4):
                scaled = [value * tir.const(scale, "float32") for value in part[first : first + 4]]
                tir.store(y, (row, step * width + first), tir.vector(scaled), 4)

    name = f"embed_{weight.format.lower()}_{weight.rows}x{k}_r{n or 'n'}"
    return tir.prim_func(name, body)
