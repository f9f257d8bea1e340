"""Give projections of packed weights int8 activations, quantised once for all readers of a row."""

from __future__ import annotations

from xpuc.ir import ops
from xpuc.ir.activation import Q8_BLOCK, reads_q8
from xpuc.passes.rewrite import Editor, Expr, Var

PROJECTIONS = ("linear", "linear_group", "gate_up")


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """Weights in a float format keep float activations; so does a row not a multiple of 32 wide."""
    name = ops.name_of(value)
    if name not in PROJECTIONS:
        return None
    attrs = ops.attrs_of(value)
    formats = attrs["formats"] if "formats" in attrs else (attrs["format"],)
    x = value.args[0]
    if not all(reads_q8(f) for f in formats):
        return None
    if ops.columns_of(x.ty) % Q8_BLOCK:
        e.report.refuse(f"{ops.columns_of(x.ty)} columns are not a multiple of {Q8_BLOCK}")
        return None
    if x not in e.memo:
        e.memo[x] = e.op("quantize", x)
    e.report.applied += 1
    return e.op(name, e.memo[x], *value.args[1:], **attrs)
