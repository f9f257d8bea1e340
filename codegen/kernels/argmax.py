"""The greedy token."""

from __future__ import annotations

from tvm import te, tirx

from xpuc.codegen.kernels.definition import Expr, f32, full_name, kernel, size

_Candidate = tuple[Expr, Expr]  # (value, column)


def argmax(v: int, m: int | None) -> tirx.PrimFunc:
    """logits f32 (m, v) -> tokens i32 (m,): lowest column of the largest value, -1 with a NaN."""
    logits = te.placeholder((size(m, "m"), v), "float32", "logits")
    j = te.reduce_axis((0, v), "j")
    best = te.comm_reducer(
        _better, lambda *_: (f32(float("-inf")), tirx.const(v, "int32")), "argmax"
    )
    value, column = te.compute(
        (logits.shape[0],),
        lambda r: best((logits[r, j], tirx.Cast("int32", j.var)), axis=j),
        "best",
    )
    tokens = te.compute(
        (logits.shape[0],),
        lambda r: tirx.Select(te.isnan(value[r]), tirx.const(-1, "int32"), column[r]),
        "tokens",
    )
    return kernel(full_name("argmax", m, v), logits, tokens)


def _better(a: _Candidate, b: _Candidate) -> _Candidate:
    """The larger; of equal ones the lower column; a NaN before any number."""
    wins = te.any(te.isnan(a[0]), a[0] > b[0], te.all(a[0] == b[0], a[1] < b[1]))
    return tirx.Select(wins, a[0], b[0]), tirx.Select(wins, a[1], b[1])
