"""Quantise a row where it is made: in the norm, the attention or the gate that computes it."""

from __future__ import annotations

from tvm import relax

from xpuc.ir import ops
from xpuc.passes.rewrite import Editor, Expr, Var

PRODUCERS = ("block_norm", "attention", "gate_up")


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """At a producer whose row only a quantize reads."""
    name = ops.name_of(value)
    if name not in PRODUCERS:
        return None
    attrs = ops.attrs_of(value)
    if attrs["quantize"]:
        return None
    items = [(v, t) for v, t in e.users(var) if isinstance(t, relax.TupleGetItem)]
    row = next((v for v, t in items if t.index == 1), None) if attrs.get("residual") else var
    quantize = None if row is None else e.only_user(row, "quantize")
    if quantize is None:
        return None
    done = e.op(name, *value.args, **(attrs | {"quantize": True}))
    e.report.applied += 1
    if not attrs.get("residual"):
        e.replace(quantize[0], done)
        return done
    for item, get in items:
        e.replace(item, e.item(done, get.index))
    e.replace(quantize[0], e.new(row))
    return done
