"""Every operation of the graph, once: operands, attributes, the type of its result, what it means.

The operations are Relax operators named `relax.xpuc.<name>`; importing this module registers them.
A call is made with `call("rms_norm", x, eps=1e-5)`. n is the number of rows (tokens) of the step,
always the first axis; activations are f32. `q8a` is the tuple of a quantised activation
(docs/formats.md), laid out block of 32 columns first: int8 values, f32 scales of the half blocks,
their scaled sums, and those of whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, relax

from xpuc.ir.activation import Q8_BLOCK

Expr = Any
Type = Any
Infer = Callable[..., Type]


@dataclass(frozen=True)
class Op:
    """An operation: `infer(attrs, *operand types)` gives its result type."""

    name: str
    meaning: str
    infer: Infer

    @property
    def full_name(self) -> str:
        return f"relax.xpuc.{self.name}"


def tensor(shape: Sequence[Any], dtype: str = "float32") -> Type:
    """The type of a tensor of this shape and dtype."""
    return relax.TensorType(list(shape), dtype)


def rows_of(ty: Type) -> Any:
    """The number of rows of an activation: n of (n, columns), or of a q8a tuple."""
    return ty.fields[0].shape[1] if isinstance(ty, relax.TupleType) else ty.shape[0]


def columns_of(ty: Type) -> int:
    """The number of columns of an activation, plain or q8a."""
    if isinstance(ty, relax.TupleType):
        return int(ty.fields[0].shape[0]) * Q8_BLOCK
    return int(ty.shape[1])


def q8a(n: Any, columns: int) -> Type:
    """The type of a quantised activation of n rows."""
    blocks = columns // Q8_BLOCK
    return relax.TupleType(
        [
            tensor((blocks, n, Q8_BLOCK), "int8"),
            tensor((blocks, n, 2)),
            tensor((blocks, n, 2)),
            tensor((blocks, n)),
        ]
    )


def _activation(n: Any, columns: int, quantize: bool) -> Type:
    return q8a(n, columns) if quantize else tensor((n, columns))


def _same(attrs: Any, x: Type, *_: Type) -> Type:
    return x


def _block_norm(attrs: Any, x: Type, *_: Type) -> Type:
    y = _activation(x.shape[0], int(x.shape[1]), bool(attrs["quantize"]))
    return relax.TupleType([x, y]) if attrs["residual"] else y


def _qk_prep(attrs: Any, *types: Type) -> Type:
    before = (1 if attrs["joined"] else 3) + 2 + (2 if attrs["norm"] else 0)
    n, pools = rows_of(types[0]), types[before:]
    return relax.TupleType([tensor((n, attrs["heads"] * attrs["head_dim"])), *pools])


def _attention(attrs: Any, q: Type, *_: Type) -> Type:
    return _activation(q.shape[0], int(q.shape[1]), bool(attrs["quantize"]))


def _gate_up(attrs: Any, x: Type, *_: Type) -> Type:
    return _activation(rows_of(x), int(attrs["rows"]), bool(attrs["quantize"]))


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        # --- as the paper writes it ---
        Op("embed", "row tokens[i] of the table (columns wide), times `scale`",
           lambda a, tokens, w: tensor((tokens.shape[0], a["columns"]))),
        Op("rms_norm", "x / sqrt(mean(x^2) + eps) over each of `groups` equal column groups",
           _same),
        Op("mul", "x * w, w of x's shape or one weight a column, repeated over column groups",
           _same),
        Op("add", "x + y, y of x's shape or one bias a column", _same),
        Op("linear", "x W^T with W packed: (rows, row bytes) of `format`",
           lambda a, x, w: tensor((rows_of(x), a["rows"]))),
        Op("silu", "x * sigmoid(x)", _same),
        Op("gelu_tanh", "gelu by its tanh approximation", _same),
        Op("softcap", "cap * tanh(x / cap)", _same),
        Op("rope_table", "cos | sin of position * inv_freq, times mscale",
           lambda a, positions, freq: tensor((positions.shape[0], 2 * int(freq.shape[0])))),
        Op("rope", "rotate each head's first columns by the table; pairing norm (2i, 2i+1) or neox",
           _same),
        Op("kv_write", "write k and v rows to the pool at `slots`; the pools are updated in place",
           lambda a, k, v, slots, *pools: relax.TupleType(list(pools))),
        Op("attention", "causal attention of each row over its sequence's pool blocks", _attention),
        Op("take_rows", "the given rows of x",
           lambda a, x, rows: tensor((rows.shape[0], x.shape[1]))),
        Op("argmax", "column of the largest value of each row, the lowest on ties, -1 with a NaN",
           lambda a, x: tensor((x.shape[0],), "int32")),
        Op("sample", "a token of each row of logits, drawn as its row of `sampling` says",
           lambda a, x, sampling: tensor((x.shape[0],), "int32")),
        # --- made by passes ---
        Op("columns", "`width` columns of x from `start`",
           lambda a, x: tensor((x.shape[0], a["width"]))),
        Op("block_norm",
           "h = x + delta (delta post-normed if w_post), y = rms_norm(h) * w; (h, y) or y",
           _block_norm),
        Op("quantize", "q8a of x", lambda a, x: q8a(x.shape[0], int(x.shape[1]))),
        Op("linear_group", "several linears of one activation side by side: (n, sum of rows)",
           lambda a, x, *ws: tensor((rows_of(x), sum(int(r) for r in a["rows"])))),
        Op("gate_up", "act(x W_gate^T) * (x W_up^T)", _gate_up),
        Op("qk_prep", "q/k norm, rope and K/V write in one: (rotated q, pools)", _qk_prep),
        Op("head_argmax", "argmax of the output head without its logits",
           lambda a, x, w: tensor((rows_of(x),), "int32")),
    )
}  # fmt: skip


def call(name: str, *operands: Expr, **attrs: Any) -> relax.Call:
    """A call of the operation; its type is inferred when it is emitted."""
    return relax.Call(ir.Op.get(OPS[name].full_name), list(operands), _attrs(attrs), [])


def name_of(expr: Expr) -> str | None:
    """`rms_norm` for a call of that operation, None for anything else."""
    if isinstance(expr, relax.Call) and isinstance(expr.op, ir.Op):
        prefix, _, name = expr.op.name.rpartition(".")
        return name if prefix == "relax.xpuc" else None
    return None


def attrs_of(expr: relax.Call) -> dict[str, Any]:
    """The call's attributes as Python values; lists become tuples."""
    return {key: _python(expr.attrs[key]) for key in expr.attrs.keys()}  # noqa: SIM118


def _attrs(values: dict[str, Any]) -> Any:
    return ir.make_node("ir.DictAttrs", **values)


def _python(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "value"):
        return value.value
    return tuple(_python(item) for item in value)


def _register(op: Op) -> None:
    tvm_ffi.get_global_func("ir.RegisterOp")(op.full_name, op.meaning)

    def infer(call: relax.Call, _context: Any) -> Type:
        return op.infer(attrs_of(call), *(operand.ty for operand in call.args))

    ir.register_op_attr(op.full_name, "FPurity", True)
    ir.register_op_attr(op.full_name, "FInferType", infer)


# Ctrl-C within a function of Python's that TVM calls, as `infer` is, comes back as what it is.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
for _op in OPS.values():
    _register(_op)
