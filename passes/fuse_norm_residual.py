"""The block boundary: add a block's result to the stream and norm the sum for the next, in one go.

add(x, delta) with block_norm(x + delta) -> block_norm(x, delta) giving both; where the block's
result has a norm of its own first (Gemma), that norm is taken in too.
"""

from __future__ import annotations

from xpuc.ir import ops
from xpuc.passes.rewrite import Editor, Expr, Var


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """At the add whose sum a plain block_norm reads."""
    if ops.name_of(value) != "add" or len(value.args[1].ty.shape) != 2:
        return None
    following = next(((v, c) for v, c in e.readers(var, "block_norm") if _plain(c)), None)
    if following is None:
        return None
    x, delta = value.args
    attrs = ops.attrs_of(following[1])
    operands = [x, delta]
    own = e.definition(delta, "block_norm")
    if (
        own is not None
        and _plain(own)
        and len(e.users(delta)) == 1
        and ops.attrs_of(own)["eps"] == attrs["eps"]
    ):
        operands = [x, own.args[0], own.args[1]]
    done = e.op(
        "block_norm",
        *operands,
        following[1].args[1],
        **(attrs | {"residual": True, "post_norm": len(operands) == 3}),
    )
    e.replace(following[0], e.item(done, 1))
    e.report.applied += 1
    return e.item(done, 0)


def _plain(norm: Expr) -> bool:
    attrs = ops.attrs_of(norm)
    return not attrs["residual"] and not attrs["quantize"]
