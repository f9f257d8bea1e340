"""The greedy tail: output head and argmax in one, so that a step gives back one integer a row."""

from __future__ import annotations

from xpuc.ir import ops
from xpuc.passes.rewrite import Editor, Expr, Var


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """A softcap between them is dropped: it is monotonic, so the largest stays the largest."""
    if ops.name_of(value) != "argmax":
        return None
    logits = value.args[0]
    capped = e.definition(logits, "softcap")
    if capped is not None:
        logits = capped.args[0]
    head = e.definition(logits, "linear")
    if head is None:
        return None
    e.report.applied += 1
    return e.op("head_argmax", *head.args, **ops.attrs_of(head))
