"""Projections of one row in one launch: q|k|v, biases included -> linear_group and its columns."""

from __future__ import annotations

from xpuc.ir import ops
from xpuc.ir.activation import same_activation
from xpuc.passes.rewrite import Editor, Expr, Var


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """At the first of the linears: emit the group and give every one its columns."""
    if ops.name_of(value) != "linear":
        return None
    x = value.args[0]
    linears = list(e.readers(x, "linear"))
    if len(linears) < 2 or not linears[0][0].same_as(var):
        return None
    attrs = [ops.attrs_of(call) for _, call in linears]
    formats = [a["format"] for a in attrs]
    if not same_activation(formats):
        e.report.refuse(f"{', '.join(formats)} read different activations")
        return None
    ends = [_with_bias(e, v) for v, _ in linears]
    rows = [a["rows"] for a in attrs]
    weights = [call.args[1] for _, call in linears]
    biases = [bias for _, bias in ends if bias is not None]
    group = e.op(
        "linear_group", x, *weights, *biases,
        formats=formats, rows=rows, bias=[bias is not None for _, bias in ends],
    )  # fmt: skip
    start = 0
    for (end, _), (linear, _), width in zip(ends, linears, rows, strict=True):
        part = e.op("columns", group, start=start, width=width)
        e.replace(linear, part)
        e.replace(end, part)
        start += width
    e.report.applied += 1
    return e.new(var)


def _with_bias(e: Editor, linear: Var) -> tuple[Var, Var | None]:
    """The variable that holds linear + bias, and the bias; the linear where there is none."""
    added = e.only_user(linear, "add")
    if added is None or len(added[1].args[1].ty.shape) != 1:
        return linear, None
    return added[0], added[1].args[1]
