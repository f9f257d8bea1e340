"""The GPU target: its schedules in order. The first that accepts an operation's place runs it.

A step of few rows runs products of whole rows by warps (`linear`, `gate_up`, `argmax`), one of many
rows on tensor cores (`matmul`, `int8_matmul` where the weights have copies, `attention_prefill`),
whose sums run in another order: their rows' bits are not those of a decode step, and
`--deterministic` does without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from xpuc.schedules import Copies, Emitter, RoofLoop, Schedule, Site, TargetFacts, Var
from xpuc.schedules.attention_job import QkPrepJob
from xpuc.schedules.cuda import (
    argmax,
    attention,
    attention_prefill,
    elementwise,
    layouts,
    read,
    sample,
    widen,
)
from xpuc.schedules.cuda.attention import Attention, DecodeKnobs
from xpuc.schedules.cuda.attention_merge import merges_whole_blocks
from xpuc.schedules.cuda.attention_prefill import PrefillKnobs
from xpuc.schedules.cuda.embed import embed
from xpuc.schedules.cuda.gate_up import gate_up
from xpuc.schedules.cuda.int8_matmul import Int8GatedKnobs, Int8GroupKnobs, Int8MatmulKnobs
from xpuc.schedules.cuda.layouts import planes
from xpuc.schedules.cuda.linear import LinearKnobs, linear
from xpuc.schedules.cuda.matmul import MatmulKnobs
from xpuc.schedules.cuda.matmul_hopper import HopperKnobs
from xpuc.schedules.cuda.norm import rms_norm
from xpuc.schedules.cuda.projections import (
    biases_of,
    emit_gated_matmul,
    emit_gated_matmul_hopper,
    emit_int8_gated_matmul,
    emit_int8_matmul,
    emit_matmul,
    emit_matmul_hopper,
    fixed,
    has_copies,
    quantised,
    suits_hopper,
    suits_mma,
    weights_of,
)
from xpuc.schedules.cuda.quantize import quantize
from xpuc.schedules.cuda.rope import qk_prep
from xpuc.schedules.cuda.spaces import (
    decode_space,
    flash_space,
    gate_up_space,
    head_space,
    hopper_space,
    linear_space,
    matmul_space,
)
from xpuc.schedules.operands import activation_of, nested, once, outputs_of, planes_of, result_rows

__all__ = ["COPIES", "SCHEDULES", "pack", "planes", "roof_loops", "tile_rows"]

COPIES: Copies = widen


def pack(format: str, raw: np.ndarray) -> Sequence[np.ndarray]:
    """A matrix's bytes (rows, row bytes) as the arrays of its planes, in order."""
    return list(layouts.pack(format, raw).values())


def tile_rows(heads: int, kv_heads: int, head_dim: int) -> int:
    """Rows a prefill tile of attention may have."""
    return attention_prefill.tile_rows_for(heads, kv_heads)


def roof_loops(facts: TargetFacts) -> list[RoofLoop]:
    """See schedules.Target."""
    n_bytes = 1 << 30  # well beyond any cache
    kernel = read.memory_read(n_bytes)
    return [RoofLoop(read.NAME, kernel, n_bytes // 4, (read.sums(n_bytes),), {"bytes": n_bytes})]


def _linear(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, biases = activation_of(site)
    kernel = once(
        linear, weights_of(site), site.weights[0].columns, fixed(result_rows(site)),
        activation=kind, bias=biases_of(site), knobs=knobs,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site), *biases], [site.result])


def _gate_up(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, _ = activation_of(site)
    kernel = once(
        gate_up, *weights_of(site), site.weights[0].columns, fixed(site.n),
        activation=kind, act=site.attrs["activation"], quantize=bool(site.attrs["quantize"]),
        knobs=knobs,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site)], outputs_of(site.result))


def _embed(emit: Emitter, site: Site, knobs: Any) -> Var:
    (weight,) = weights_of(site)
    kernel = once(embed, weight, site.weights[0].columns, site.n, site.attrs["scale"])
    return emit.launch(kernel, [site.operands[0], *planes_of(site)], [site.result])


def _head_argmax(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, _ = activation_of(site)
    (weight,) = weights_of(site)
    n, rows = fixed(result_rows(site)), site.result.shape[0]
    blocks = argmax.head_blocks(weight.rows, knobs)
    kernel = once(
        argmax.head_best, weight, site.weights[0].columns, n, activation=kind, knobs=knobs
    )
    found = [relax.TensorType([rows, blocks], dtype) for dtype in ("float32", "int32")]
    best = emit.launch(kernel, [*x, *planes_of(site)], found)
    search = once(argmax.best_of_blocks, blocks, n)
    return emit.launch(search, [emit.item(best, 0), emit.item(best, 1)], [site.result])


def _block_norm(emit: Emitter, site: Site, knobs: Any) -> Var:
    a = site.attrs
    d = int(site.operands[0].ty.shape[1])
    kernel = once(
        rms_norm, d, site.n, a["eps"],
        residual=bool(a["residual"]), post_norm=bool(a["post_norm"]), quantize=bool(a["quantize"]),
    )  # fmt: skip
    return nested(emit, emit.launch(kernel, site.operands, outputs_of(site.result)), site.result)


def _quantize(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(quantize, int(site.operands[0].ty.shape[1]), site.n)
    return emit.launch(kernel, site.operands, outputs_of(site.result))


def _rope_table(emit: Emitter, site: Site, knobs: Any) -> Var:
    n_rot = 2 * int(site.operands[1].ty.shape[0])
    kernel = once(elementwise.rope_table, n_rot, site.n, site.attrs["mscale"])
    return emit.launch(kernel, site.operands, [site.result])


def _qk_prep(emit: Emitter, site: Site, knobs: Any) -> Var:
    a, joined = site.attrs, bool(site.attrs["joined"])
    table = site.operands[1 if joined else 3]
    job = QkPrepJob(
        a["heads"], a["kv_heads"], a["head_dim"], int(table.ty.shape[1]), a["pairing"],
        eps=a["eps"] if a["norm"] else None, kv_dtype=site.kv_dtype,
        block_tokens=site.block_tokens, joined=joined,
    )  # fmt: skip
    q, *pools = site.result.fields
    first = len(site.operands) - len(pools)
    done = emit.launch_in_place(
        once(qk_prep, job, site.n), site.operands, [*pools, q],
        [*range(first, len(site.operands)), -1],
    )  # fmt: skip
    return emit.emit(relax.Tuple([emit.item(done, i) for i in (len(pools), *range(len(pools)))]))


def _attention_job(site: Site) -> Attention:
    a = site.attrs
    return Attention(
        a["heads"], a["kv_heads"], a["head_dim"],
        scale=a["scale"], window=a["window"] or None, softcap=a["softcap"] or None,
        kv_dtype=site.kv_dtype, block_tokens=site.block_tokens,
    )  # fmt: skip


def _attention_decode(emit: Emitter, site: Site, knobs: Any) -> Var:
    q, *pools, positions, tiles, work, block_table = site.operands
    job, items = _attention_job(site), work.ty.shape[0]
    shared_out = knobs.shared_out(job)
    acc = relax.TensorType([items, job.heads, job.head_dim], "float32")
    ml = relax.TensorType([items, job.heads, 2], "float32")
    arrived = emit.zeros(relax.TensorType([site.n, shared_out.kv_heads], "int32"))
    quantizes = bool(site.attrs["quantize"]) and merges_whole_blocks(job)
    rows = relax.TensorType(list(q.ty.shape), "float32")
    outputs = outputs_of(site.result) if quantizes else [rows]
    made = emit.launch(
        once(attention.attention_decode, job, site.n, quantize=quantizes, knobs=knobs),
        [q, positions, tiles, work, block_table, *pools, arrived], [acc, ml, *outputs],
    )  # fmt: skip
    results = [emit.item(made, 2 + i) for i in range(len(outputs))]
    if quantizes:
        return emit.emit(relax.Tuple(results))
    return quantised(emit, site, results[0], int(q.ty.shape[1]))


def _attention_flash(emit: Emitter, site: Site, knobs: Any) -> Var:
    q, *pools, positions, tiles, work, block_table = site.operands
    job = _attention_job(site)
    kernel = once(attention_prefill.attention_prefill, job, site.n, knobs=knobs)
    rows = relax.TensorType(list(q.ty.shape), "float32")
    out = emit.launch(kernel, [q, positions, tiles, work, block_table, *pools], [rows])
    return quantised(emit, site, out, int(q.ty.shape[1]))


def _argmax(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(argmax.argmax, int(site.operands[0].ty.shape[1]), result_rows(site))
    return emit.launch(kernel, site.operands, [site.result])


def _sample(emit: Emitter, site: Site, knobs: Any) -> Var:
    logits, sampling = site.operands
    rows, v = logits.ty.shape
    keys = relax.TensorType([rows, sample.groups_of(int(v))], "uint32")
    best = emit.launch(once(sample.group_best, int(v)), [logits, sampling], [keys])
    return emit.launch(once(sample.sample, int(v)), [logits, best, sampling], [site.result])


def _take_rows(emit: Emitter, site: Site, knobs: Any) -> Var:
    columns = int(site.operands[0].ty.shape[1])
    kernel = once(elementwise.take_rows, columns, site.n, result_rows(site))
    return emit.launch(kernel, site.operands, [site.result])


def _softcap(emit: Emitter, site: Site, knobs: Any) -> Var:
    columns = int(site.operands[0].ty.shape[1])
    kernel = once(elementwise.softcap, columns, result_rows(site), site.attrs["cap"])
    return emit.launch(kernel, site.operands, [site.result])


def _add(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(elementwise.residual_add, int(site.operands[0].ty.shape[1]), site.n)
    return emit.launch(kernel, site.operands, [site.result])


def _zeros(emit: Emitter, site: Site, knobs: Any) -> Var:
    columns = int(site.result.shape[1])
    kernel = once(elementwise.zeros, columns, site.n, str(site.result.dtype))
    return emit.launch(kernel, [], [site.result])


def _always(site: Site) -> bool:
    return True


def _decodes(site: Site) -> bool:
    return site.n is not None


def _flash(site: Site) -> bool:
    return attention_prefill.accepts(_attention_job(site))


def _quantised_rows_are_whole(site: Site) -> bool:
    return not site.attrs["quantize"] or site.attrs["rows"] % 32 == 0


def _two_rows_alike(site: Site) -> bool:
    return len(site.operands[1].ty.shape) == 2


# Of many rows, whose factors are rounded: to f16, or to int8 with a scale for 256 of them.
_rounding_f16 = partial(Schedule, batch_invariant=False, tolerance=2e-3)
_rounding_int8 = partial(Schedule, batch_invariant=False, tolerance=2e-2)

# fmt: off
SCHEDULES: tuple[Schedule, ...] = (
    _rounding_int8("int8_matmul", "linear", has_copies, emit_int8_matmul, Int8MatmulKnobs),
    _rounding_int8("int8_matmul", "linear_group", has_copies, emit_int8_matmul, Int8GroupKnobs),
    _rounding_int8(
        "int8_gated_matmul", "gate_up", has_copies, emit_int8_gated_matmul, Int8GatedKnobs
    ),
    *(
        _rounding_f16(
            "matmul_hopper", op, suits_hopper, emit_matmul_hopper, HopperKnobs, hopper_space
        )
        for op in ("linear", "linear_group")
    ),
    _rounding_f16(
        "gated_matmul_hopper", "gate_up", suits_hopper, emit_gated_matmul_hopper, HopperKnobs,
        hopper_space,
    ),
    _rounding_f16("matmul", "linear", suits_mma, emit_matmul, MatmulKnobs, matmul_space),
    _rounding_f16("matmul", "linear_group", suits_mma, emit_matmul, MatmulKnobs, matmul_space),
    _rounding_f16(
        "gated_matmul", "gate_up", suits_mma, emit_gated_matmul, MatmulKnobs, matmul_space
    ),
    Schedule("linear_warps", "linear", _always, _linear, LinearKnobs, linear_space),
    Schedule("linear_warps", "linear_group", _always, _linear, LinearKnobs, linear_space),
    Schedule(
        "gate_up_warps", "gate_up", _quantised_rows_are_whole, _gate_up, LinearKnobs, gate_up_space
    ),
    Schedule("embed", "embed", _always, _embed),
    Schedule("head_best", "head_argmax", _always, _head_argmax, argmax.HeadKnobs, head_space),
    Schedule("block_norm", "block_norm", _always, _block_norm),
    Schedule("quantize", "quantize", _always, _quantize),
    Schedule("rope_table", "rope_table", _always, _rope_table),
    Schedule("qk_prep", "qk_prep", _always, _qk_prep),
    Schedule(
        "attention_decode", "attention", _decodes, _attention_decode, DecodeKnobs, decode_space
    ),
    _rounding_f16(
        "attention_flash", "attention", _flash, _attention_flash, PrefillKnobs, flash_space
    ),
    Schedule("argmax", "argmax", _always, _argmax),
    Schedule("sample", "sample", _always, _sample),
    Schedule("take_rows", "take_rows", _always, _take_rows),
    Schedule("softcap", "softcap", _always, _softcap),
    Schedule("add", "add", _two_rows_alike, _add),
    Schedule("zeros", "zeros", _always, _zeros),
)
# fmt: on
