"""qkPrep: the norms of q and k, their rotation and the K/V write in one pass over the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax

from xpuc.ir import ops
from xpuc.passes.rewrite import Editor, Expr, Var


@dataclass(frozen=True)
class _Rotated:
    """rope(x) or rope(mul(rms_norm(x), weight))."""

    x: Var
    table: Var
    attrs: dict[str, Any]
    weight: Var | None
    eps: float


def visit(e: Editor, var: Var, value: Expr) -> Expr | None:
    """At kv_write(rope(k), v): take in rope(q) of the attention that reads these pools."""
    if ops.name_of(value) != "kv_write":
        return None
    k_var, v, slots, *pools = value.args
    items = [(i, t) for i, t in e.users(var) if isinstance(t, relax.TupleGetItem)]
    attention = next((call for i, _ in items for _, call in e.readers(i, "attention")), None)
    if attention is None:
        return None
    q_var = attention.args[0]
    q, k = _rotated(e, q_var), _rotated(e, k_var)
    if q is None or k is None or len(e.users(k_var)) != 1 or len(e.users(q_var)) != 1:
        return None
    if not _alike(q, k):
        e.report.refuse("q and k are not prepared alike")
        return None
    joined = _joined(e, (q.x, k.x, v))
    sources = (q.x, k.x, v) if joined is None else (joined,)
    norms = () if q.weight is None else (q.weight, k.weight)
    done = e.op(
        "qk_prep", *sources, q.table, slots, *norms, *pools,
        heads=q.attrs["heads"], kv_heads=k.attrs["heads"], head_dim=q.attrs["head_dim"],
        pairing=q.attrs["pairing"], eps=q.eps, norm=q.weight is not None, joined=joined is not None,
    )  # fmt: skip
    e.replace(q_var, e.item(done, 0))
    for item, get in items:
        e.replace(item, e.item(done, get.index + 1))
    e.report.applied += 1
    return done


def _alike(q: _Rotated, k: _Rotated) -> bool:
    """Whether one set of attributes describes both: qk_prep has no second."""
    same_norm = (q.weight is None) == (k.weight is None) and q.eps == k.eps
    same_heads = all(q.attrs[key] == k.attrs[key] for key in ("head_dim", "pairing"))
    return same_norm and same_heads and bool(q.table.same_as(k.table))


def _rotated(e: Editor, var: Var) -> _Rotated | None:
    rope = e.definition(var, "rope")
    if rope is None:
        return None
    x, table = rope.args
    attrs = ops.attrs_of(rope)
    mul = e.definition(x, "mul")
    norm = e.definition(mul.args[0], "rms_norm") if mul is not None else None
    if mul is None or norm is None or ops.attrs_of(norm)["groups"] != attrs["heads"]:
        return _Rotated(x, table, attrs, None, 0.0)
    return _Rotated(norm.args[0], table, attrs, mul.args[1], ops.attrs_of(norm)["eps"])


def _joined(e: Editor, parts: tuple[Var, ...]) -> Var | None:
    """The activation whose consecutive columns the parts are, if they are all of it."""
    calls = [c for p in parts if (c := e.definition(p, "columns")) is not None]
    if len(calls) < len(parts):
        return None
    whole, start = calls[0].args[0], 0
    for call in calls:
        attrs = ops.attrs_of(call)
        if not call.args[0].same_as(whole) or attrs["start"] != start:
            return None
        start += attrs["width"]
    return whole if start == ops.columns_of(whole.ty) else None
