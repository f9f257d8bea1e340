"""Gate and up projections and their activation: mul(act(x Wg), x Wu) -> gate_up(x, Wg, Wu)."""

from __future__ import annotations

from xpuc.ir import ops
from xpuc.ir.activation import same_activation
from xpuc.passes.rewrite import Editor, Expr, Var

ACTIVATIONS = ("silu", "gelu_tanh")


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """Either operand of the product may be the activated one; both linears have no other reader."""
    if ops.name_of(value) != "mul":
        return None
    for activated, plain in (tuple(value.args), tuple(value.args)[::-1]):
        activation = e.definition(activated)
        up = e.definition(plain, "linear")
        if activation is None or up is None or ops.name_of(activation) not in ACTIVATIONS:
            continue
        gate = e.definition(activation.args[0], "linear")
        alone = all(len(e.users(v)) == 1 for v in (activated, plain, activation.args[0]))
        if gate is None or not alone or not gate.args[0].same_as(up.args[0]):
            continue
        g, u = ops.attrs_of(gate), ops.attrs_of(up)
        if not same_activation((g["format"], u["format"])):
            e.report.refuse(f"{g['format']} and {u['format']} read different activations")
            return None
        e.report.applied += 1
        return e.op(
            "gate_up", up.args[0], gate.args[1], up.args[1],
            formats=[g["format"], u["format"]], rows=g["rows"],
            activation=ops.name_of(activation), quantize=False,
        )  # fmt: skip
    return None
