"""Int8 copies of weights for prompts: which matrices have one, and the functions that make them.

A copy is made on the device when the artifact is loaded, from the packed planes, so the artifact is
no larger for it. Steps that decode never read one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tvm import relax, tirx

from xpuc.artifact import Copy
from xpuc.codegen import lower
from xpuc.errors import RequestError
from xpuc.ir import ops, scope
from xpuc.schedules import Copies, Target

POLICIES = ("packed", "int8", "auto")
VARIANTS = {  # of a prefill entry point: what its name has more, and whether it takes the copies
    "packed": (("", False),),
    "int8": (("", True),),
    "auto": (("", False), ("int8", True)),
}
_PROJECTIONS = ("linear", "linear_group", "gate_up")

Matrices = Mapping[str, tuple[str, int, int]]  # parameter -> format, rows, columns


def check(policy: str, target: str, activations: str) -> None:
    """Refuse copies where nothing could be multiplied with them."""
    if not target.startswith("cuda"):
        raise RequestError(
            f"--prefill-weights {policy}: not for {target}",
            "its prompts read the packed weights: leave it out, or say --target cuda",
        )
    if activations != "int8":
        raise RequestError(
            f"--prefill-weights {policy}: not with --activations {activations}",
            "int8 weights are multiplied with int8 activations: leave one of the two out",
        )


def copied(prefill: relax.Function, target: Target, policy: str) -> Matrices:
    """The matrices of a prefill function that have copies; RequestError if `int8` finds none.

    Those of projections of all rows of the step, whose matrices are all of formats that pay.
    """
    if policy == "packed" or target.COPIES is None:
        return {}
    formats = {name: format for name, format, _, _ in lower.weight_formats(prefill)}
    found = set()
    for binding in prefill.body.blocks[0].bindings:
        if ops.name_of(binding.value) not in _PROJECTIONS or not _is_of_all_rows(binding.value):
            continue
        names = [a.name for a in binding.value.args if getattr(a, "name", None) in formats]
        if all(target.COPIES.pays(formats[name]) for name in names):
            found.update(names)
    if policy == "int8" and not found:
        raise _none_pays(formats.values(), target.COPIES)
    return {
        name: (format, rows, columns)
        for name, format, rows, columns in lower.weight_formats(prefill)
        if name in found
    }


def _is_of_all_rows(call: relax.Call) -> bool:
    """Whether it is of all rows of the step, and not of the wanted ones only, as the head is."""
    ty = call.ty
    while isinstance(ty, relax.TupleType):
        ty = ty.fields[0]
    return any(getattr(dimension, "name", None) == "n" for dimension in ty.shape)


def _none_pays(formats: Iterable[str], copies: Copies) -> RequestError:
    reasons = "; ".join(
        f"{name}: {copies.why_not(name)}" for name in sorted(set(formats)) if not copies.pays(name)
    )
    return RequestError(
        "--prefill-weights int8: pays for no matrix of this model"
        + (f" ({reasons})" if reasons else ""),
        "leave it out, or say auto",
    )


def add_makers(lowered: lower.Lowered, copies: Copies, matrices: Matrices) -> None:
    """Add the function of each format that makes a copy: its element planes to int8 codes."""
    for format in sorted({format for format, _, _ in matrices.values()}):
        first, *others = copies.element_planes(format)
        n_words = tirx.Var(first, "int64")
        params = [
            relax.Var(name, ops.tensor((size,), "uint32"))
            for name, size in ((first, n_words), *((n, tirx.Var(n, "int64")) for n in others))
        ]
        name, size = maker(format), n_words * copies.codes_per_word(format)
        with scope.function(lowered.builder, name, params):
            with lowered.builder.dataflow():
                kernel = lowered.add_kernel(copies.widen(format))
                called = relax.call_tir(kernel, params, [ops.tensor((size,), "int8")])
                out = lowered.builder.emit_output(called)
            lowered.builder.emit_func_output(out)


def maker(format: str) -> str:
    """The function that makes copies of matrices of a format."""
    return f"copy_{format.lower()}"


def records(matrices: Matrices, target: Target, names: Mapping[str, str]) -> tuple[Copy, ...]:
    """What the manifest says of the copies; `names` are the tensors' by parameter."""
    found = []
    for parameter, (format, rows, columns) in matrices.items():
        assert target.COPIES is not None
        planes = target.COPIES.element_planes(format)
        name = names[parameter]
        sources = tuple(f"{name}.{plane}" for plane in planes)
        found.append(Copy(name, maker(format), rows * columns, sources))
    return tuple(found)
