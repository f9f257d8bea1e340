"""Projections at their places in a model: their kernels for many rows, and who may have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from xpuc.schedules import Emitter, Site, Var
from xpuc.schedules.cuda import (
    int8_matmul,
    matmul,
    matmul_hopper,
    regroup,
)
from xpuc.schedules.cuda.activation_rows import widen_rows, widened_columns
from xpuc.schedules.cuda.products import MOST_ROWS, Weight
from xpuc.schedules.cuda.quantize import quantize
from xpuc.schedules.operands import activation_of, once, outputs_of, planes_of


def weights_of(site: Site) -> tuple[Weight, ...]:
    return tuple(Weight(w.format, w.rows) for w in site.weights)


def fixed(n: int | None) -> int | None:
    """A number of rows that kernels are made for."""
    return n if n is not None and n <= MOST_ROWS else None


def biases_of(site: Site) -> tuple[bool, ...]:
    return tuple(bool(b) for b in site.attrs.get("bias", (False,) * len(site.weights)))


def emit_matmul(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, biases = activation_of(site)
    kernel = once(
        matmul.matmul, weights_of(site), site.weights[0].columns,
        activation=kind, bias=biases_of(site), knobs=knobs,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site), *biases], [site.result])


def _widened(emit: Emitter, site: Site) -> Var:
    """The activation of a projection as products of warpgroups take it."""
    kind, x, _ = activation_of(site)
    k = site.weights[0].columns
    wide = relax.TensorType([_rows(kind, x), widened_columns(k)], "float16")
    return emit.launch(once(widen_rows, k, activation=kind), x, [wide])


def _rows(kind: str, x: Sequence[Var]) -> Any:
    return x[0].ty.shape[1] if kind == "q8" else x[0].ty.shape[0]


def emit_matmul_hopper(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(
        matmul_hopper.matmul, weights_of(site), site.weights[0].columns, bias=biases_of(site),
        knobs=knobs,
    )  # fmt: skip
    _, _, biases = activation_of(site)
    return emit.launch(kernel, [_widened(emit, site), *planes_of(site), *biases], [site.result])


def emit_gated_matmul(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, _ = activation_of(site)
    gate, up = weights_of(site)
    kernel = once(
        matmul.gated_matmul, gate, up, site.weights[0].columns,
        activation=kind, act=site.attrs["activation"], knobs=knobs,
    )  # fmt: skip
    h = relax.TensorType([_rows(kind, x), gate.rows], "float32")
    return quantised(emit, site, emit.launch(kernel, [*x, *planes_of(site)], [h]), gate.rows)


def emit_gated_matmul_hopper(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, _ = activation_of(site)
    gate, up = weights_of(site)
    kernel = once(
        matmul_hopper.gated_matmul, gate, up, site.weights[0].columns,
        act=site.attrs["activation"], knobs=knobs,
    )  # fmt: skip
    h = relax.TensorType([_rows(kind, x), gate.rows], "float32")
    made = emit.launch(kernel, [_widened(emit, site), *planes_of(site)], [h])
    return quantised(emit, site, made, gate.rows)


def emit_int8_matmul(emit: Emitter, site: Site, knobs: Any) -> Var:
    x, biases = _grouped(emit, site)
    kernel = once(
        int8_matmul.int8_matmul, weights_of(site), site.weights[0].columns,
        bias=biases_of(site), knobs=knobs,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site), *site.copies, *biases], [site.result])


def emit_int8_gated_matmul(emit: Emitter, site: Site, knobs: Any) -> Var:
    x, _ = _grouped(emit, site)
    gate, up = weights_of(site)
    kernel = once(
        int8_matmul.int8_gated_matmul, gate, up, site.weights[0].columns,
        act=site.attrs["activation"], knobs=knobs,
    )  # fmt: skip
    rows = site.operands[0].ty.shape[1]
    h = emit.launch(
        kernel, [*x, *planes_of(site), *site.copies],
        [relax.TensorType([rows, gate.rows], "float32")],
    )  # fmt: skip
    return quantised(emit, site, h, gate.rows)


def _grouped(emit: Emitter, site: Site) -> tuple[list[Var], list[Var]]:
    """The activation of a projection with a scale for 256 columns, and the operands after it."""
    _, x, others = activation_of(site)
    n, k = x[0].ty.shape[1], site.weights[0].columns
    made = [relax.TensorType(list(shape), dtype) for _, shape, dtype in regroup.shapes(n, k)]
    grouped = emit.launch(once(regroup.regroup, k), x, made)
    return [emit.item(grouped, i) for i in range(len(made))], others


def quantised(emit: Emitter, site: Site, value: Var, columns: int) -> Var:
    """The value, quantised if the site asks for it."""
    if not site.attrs["quantize"]:
        return value
    return emit.launch(once(quantize, columns, fixed(site.n)), [value], outputs_of(site.result))


def suits_mma(site: Site) -> bool:
    return _fits_f16(site) and matmul.accepts(site.weights[0].columns)


def suits_hopper(site: Site) -> bool:
    can = "wgmma" in site.target.features
    return can and _fits_f16(site) and matmul_hopper.accepts(site.weights[0].columns)


def _fits_f16(site: Site) -> bool:
    """Whether it is of many rows, and neither factor is more exact than f16 can tell."""
    is_exact = activation_of(site)[0] == "f32" and any(
        w.format not in ("F16", "BF16") for w in site.weights
    )
    return site.n is None and not is_exact


def has_copies(site: Site) -> bool:
    return bool(site.copies) and activation_of(site)[0] == "q8"
