"""What a schedule reads off a site on any target, and how it gives results back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tvm import relax, tirx

from xpuc.schedules import Emitter, Site, Type, Var

# A model has hundreds of operations and a few dozen kernels: each of them, and the facts it is made
# from, is built once.
once: Callable[..., Any] = cache(lambda build, *args, **options: build(*args, **options))


def planes_of(site: Site) -> list[Var]:
    """The planes of all its matrices, in order."""
    return [plane for w in site.weights for plane in w.planes]


def activation_of(site: Site) -> tuple[str, list[Var], list[Var]]:
    """The kind of the activation a projection reads, its tensors, and the operands after it."""
    first = site.operands[0].ty
    if str(first.dtype) == "int8":
        return "q8", list(site.operands[:4]), list(site.operands[4:])
    return "f32", list(site.operands[:1]), list(site.operands[1:])


def outputs_of(ty: Type) -> list[Type]:
    """The tensors of a result, tuples flattened."""
    if isinstance(ty, relax.TupleType):
        return [t for field in ty.fields for t in outputs_of(field)]
    return [ty]


def nested(emit: Emitter, flat: Var, ty: Type) -> Var:
    """A flat tuple of tensors as the nested tuple the graph knows."""
    if not isinstance(ty, relax.TupleType) or all(
        not isinstance(f, relax.TupleType) for f in ty.fields
    ):
        return flat
    index = iter(range(len(outputs_of(ty))))

    def build(t: Type) -> Any:
        if isinstance(t, relax.TupleType):
            return relax.Tuple([build(f) for f in t.fields])
        return emit.item(flat, next(index))

    return emit.emit(build(ty))


def result_rows(site: Site) -> int | None:
    """Rows of the result where they are known; they may be fewer than those of the step."""
    rows = site.result.shape[0]
    return int(rows) if isinstance(rows, tirx.IntImm) else None
