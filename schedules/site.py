"""An operation at its place in a model: what a schedule builds kernels from, and what names it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from xpuc.ir import ops
from xpuc.tune_db import Key

Var = Any
Type = Any

_NOT_IN_KEYS = ("format", "formats", "rows", "columns")  # the weights say them
_SHORT = {"float16": "f16", "int8": "i8"}  # dtypes that tell sites apart


@dataclass(frozen=True)
class Weight:
    """A packed matrix as an operand: its format, its shape, its planes in the target's layout.

    `codes` is its int8 copy (rows * columns,), where the step takes one.
    """

    format: str
    rows: int
    columns: int
    planes: tuple[Var, ...]
    codes: Var | None = None


@dataclass(frozen=True)
class TargetFacts:
    """What schedules decide by: the kind (llvm, cuda), the CPU or GPU, its features.

    For several GPU architectures at once `cpu` names them all, with commas, and the rest is what
    holds on each.
    """

    kind: str
    cpu: str
    features: frozenset[str]
    shared_bytes: int = 0  # a GPU's block may have


@dataclass(frozen=True)
class Site:
    """An operation at its place. `n` is the number of rows, None if it is known at run time only.

    `operands` are the activations and vectors, tuples flattened; `weights` the packed matrices, in
    order.
    """

    op: str
    attrs: dict[str, Any]
    n: int | None
    operands: tuple[Var, ...]
    weights: tuple[Weight, ...]
    result: Type
    target: TargetFacts
    block_tokens: int
    kv_dtype: str

    @property
    def copies(self) -> tuple[Var, ...]:
        """The copies of its matrices, or none if one has none."""
        found = tuple(w.codes for w in self.weights if w.codes is not None)
        return found if len(found) == len(self.weights) else ()

    @property
    def key(self) -> Key:
        """What the tune database knows this site by."""
        attrs = {
            name: value
            for name, value in self.attrs.items()
            if isinstance(value, int | str) and not (self.weights and name in _NOT_IN_KEYS)
        }
        first = (
            ",".join(f"{w.format}:{w.rows}x{w.columns}" for w in self.weights) or self._columns()
        )
        exact = ["f32"] if self.weights and self._is_exact() else []
        parts = [
            *([first] if first else []),
            *exact,
            *(f"{name}={_text(attrs[name])}" for name in sorted(attrs)),
        ]
        return Key(self.op, ",".join(parts), self.n or 0, self.target.kind, self.target.cpu)

    def _is_exact(self) -> bool:
        return str(self.operands[0].ty.dtype) == "float32"

    def _columns(self) -> str:
        """Rows are symbols or the bucket; what tells sites apart is the last axis and the rank."""
        return "x".join(
            (_size(o.ty.shape[-1]) if len(o.ty.shape) > 1 else "1d")
            + _SHORT.get(str(o.ty.dtype), "")
            for o in self.operands
        )

    def facts(self) -> dict[str, Any]:
        """The site as JSON can hold it, but for the target: `site_of` makes it again."""
        return {
            "op": self.op,
            "attrs": self.attrs,
            "rows": self.n,
            "operands": [_type_facts(o.ty) for o in self.operands],
            "weights": [[w.format, w.rows, w.columns] for w in self.weights],
            "result": _type_facts(self.result),
            "block_tokens": self.block_tokens,
            "kv_dtype": self.kv_dtype,
            **({"copies": True} if self.copies else {}),
        }


def site_of(facts: dict[str, Any], target: TargetFacts, planes: Any) -> Site:
    """The site of `Site.facts`, with variables of its own.

    `planes(format, rows, columns)` gives the planes of the target's layout.
    """
    symbols: dict[str, Any] = {}
    operands = (relax.Var(f"x{i}", _type(f, symbols)) for i, f in enumerate(facts["operands"]))
    return Site(
        op=facts["op"], attrs={k: _tuples(v) for k, v in facts["attrs"].items()},
        n=facts["rows"], operands=tuple(operands),
        weights=tuple(
            _weight(f, r, c, planes(f, r, c), is_copied=facts.get("copies", False))
            for f, r, c in facts["weights"]
        ),
        result=_type(facts["result"], symbols), target=target,
        block_tokens=facts["block_tokens"], kv_dtype=facts["kv_dtype"],
    )  # fmt: skip


def _weight(
    format: str, rows: int, columns: int, planes: Iterable[Any], *, is_copied: bool
) -> Weight:
    made = (relax.Var(p.name, ops.tensor((p.size,), p.dtype)) for p in planes)
    codes = relax.Var("codes", ops.tensor((rows * columns,), "int8")) if is_copied else None
    return Weight(format, rows, columns, tuple(made), codes)


def _type_facts(ty: Type) -> list[Any]:
    """[dtype, dimension, ...] of a tensor, a list of those of a tuple; a symbol is its name."""
    if isinstance(ty, relax.TupleType):
        return [_type_facts(field) for field in ty.fields]
    return [str(ty.dtype), *map(_dimension, ty.shape.values)]


def _type(facts: list[Any], symbols: dict[str, Any]) -> Type:
    if isinstance(facts[0], list):
        return relax.TupleType([_type(field, symbols) for field in facts])
    dtype, *shape = facts

    def dimension(d: int | str) -> Any:
        return d if isinstance(d, int) else symbols.setdefault(d, tirx.Var(d, "int64"))

    return ops.tensor([dimension(d) for d in shape], dtype)


def _dimension(value: Any) -> int | str:
    if isinstance(value, tirx.Var):  # of one group of layers: which one makes no other site
        return str(value.name).partition(".")[0]
    return int(value)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _size(dimension: Any) -> str:
    """A dimension as text: its number, or its symbol's name."""
    return str(_dimension(dimension))


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
