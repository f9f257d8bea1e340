"""Take the wanted rows early: right behind the attention of the last layer.

take_rows(f(x, w), rows) -> f(take_rows(x, rows), w) where f makes each row from that row alone and
nothing else reads what it makes. So the last layer's output projection and feed-forward run for the
rows whose logits are wanted, seldom more than one of a chunk; its keys and values are those of all.
"""

from __future__ import annotations

from tvm import relax

from xpuc.ir import ops
from xpuc.passes.rewrite import Editor, Expr, Var

ROW_WISE = ("linear", "rms_norm", "mul", "add", "silu", "gelu_tanh")


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """At the take_rows; the pass drops what it no longer needs."""
    if ops.name_of(value) != "take_rows":
        return None
    x, rows = value.args
    behind = _read_for(e, var)
    if x not in behind:
        return None
    taken: dict[Var, Var] = {}

    def wanted(operand: Expr) -> Expr:
        if not ops.rows_of(operand.ty).same_as(ops.rows_of(x.ty)):
            return e.new(operand)  # a weight
        if operand not in taken:
            taken[operand] = e.op("take_rows", operand, rows)
        return taken[operand]

    for each, call in behind.items():
        taken[each] = e.emit(relax.Call(call.op, [wanted(a) for a in call.args], call.attrs, []))
    e.report.applied += 1
    return taken[x]


def _read_for(e: Editor, var: Var) -> dict[Var, Expr]:
    """The row-wise operations that nothing is read of but for `var`, in order."""
    found: dict[Var, Expr] = {}
    for b in reversed(e.bindings):
        users = e.users(b.var)
        alone = all(user == var or user in found for user, _ in users)
        if users and alone and ops.name_of(b.value) in ROW_WISE:
            found[b.var] = b.value
    return dict(reversed(found.items()))
