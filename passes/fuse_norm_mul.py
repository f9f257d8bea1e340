"""RMS norm and the product with its weights in one: mul(rms_norm(x), w) -> block_norm(x, w)."""

from __future__ import annotations

from xpuc.ir import ops
from xpuc.passes.rewrite import Editor, Expr, Var


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """Only norms of whole rows; a norm of each head belongs to fuse_rope_kv."""
    if ops.name_of(value) != "mul":
        return None
    x, w = value.args
    norm = e.definition(x, "rms_norm")
    if norm is None or len(w.ty.shape) != 1 or e.only_user(x, "mul") is None:
        return None
    attrs = ops.attrs_of(norm)
    if attrs["groups"] != 1:
        return None
    e.report.applied += 1
    return e.op(
        "block_norm",
        norm.args[0],
        w,
        eps=attrs["eps"],
        residual=False,
        post_norm=False,
        quantize=False,
    )
