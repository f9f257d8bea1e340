"""The CPU target: its schedules in order. The first that accepts an operation's place runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from xpuc.schedules import Emitter, RoofLoop, Schedule, Site, TargetFacts, Var
from xpuc.schedules.llvm import layouts, peak, read, select
from xpuc.schedules.llvm.attention import attention_reduce, attention_split
from xpuc.schedules.llvm.attention_core import Attention, AttentionKnobs
from xpuc.schedules.llvm.attention_prefill import attention_prefill, tile_rows_for
from xpuc.schedules.llvm.embed import embed
from xpuc.schedules.llvm.gate_up import gate_up
from xpuc.schedules.llvm.head import head_argmax
from xpuc.schedules.llvm.isa import Isa, isa_for
from xpuc.schedules.llvm.layouts import planes
from xpuc.schedules.llvm.linear import linear
from xpuc.schedules.llvm.norm import residual_add, rms_norm
from xpuc.schedules.llvm.products import MOST_UNROLLED, LinearKnobs, Weight
from xpuc.schedules.llvm.quantize import quantize
from xpuc.schedules.llvm.rope import QkPrep, qk_prep, rope_table
from xpuc.schedules.llvm.spaces import attention_space, linear_space
from xpuc.schedules.operands import activation_of, nested, once, outputs_of, planes_of, result_rows

__all__ = ["COPIES", "SCHEDULES", "pack", "planes", "roof_loops", "tile_rows"]

COPIES = None  # prompts read the packed weights, as decoding does


def pack(format: str, raw: np.ndarray) -> Sequence[np.ndarray]:
    """A matrix's bytes (rows, row bytes) as the arrays of its planes, in order."""
    return list(layouts.pack(format, raw).values())


def tile_rows(heads: int, kv_heads: int, head_dim: int) -> int:
    """Rows a prefill tile of attention may have."""
    return tile_rows_for(heads, kv_heads, head_dim)


def roof_loops(facts: TargetFacts) -> list[RoofLoop]:
    """See schedules.Target."""
    n_bytes, parts = 128 << 20, 256  # well beyond any cache
    kernel, sums = read.memory_read(n_bytes, parts), (parts * read.LANES,)
    loops = [RoofLoop(read.NAME, kernel, n_bytes // 4, sums, {"bytes": n_bytes})]
    isa = isa_for(facts.features)
    products = peak.int8_peak(isa)
    if products is not None:
        result, operations = (peak.CHUNKS, read.LANES), {"operations": peak.operations(isa)}
        loops.append(RoofLoop(peak.NAME, products, read.LANES, result, operations))
    return loops


def _weights(site: Site) -> tuple[Weight, ...]:
    return tuple(Weight(w.format, w.rows) for w in site.weights)


def _isa(site: Site) -> Isa:
    return once(isa_for, site.target.features)


def _fixed(n: int) -> int | None:
    """A number of rows kernels are made for: so few that each row has registers of its own.

    Beyond, one kernel for any number of rows is as fast, and every bucket and prefill share it.
    """
    return n if n <= MOST_UNROLLED else None


def _n(site: Site) -> int | None:
    return None if site.n is None else _fixed(site.n)


def _linear(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, biases = activation_of(site)
    bias = site.attrs.get("bias", (False,) * len(site.weights))
    kernel = once(
        linear, _weights(site), site.weights[0].columns, _n(site),
        activation=kind, bias=tuple(bool(b) for b in bias),
        isa=_isa(site), knobs=knobs,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site), *biases], [site.result])


def _gate_up(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, _ = activation_of(site)
    gate, up = _weights(site)
    kernel = once(
        gate_up,
        gate, up, site.weights[0].columns, _n(site),
        activation=kind, act=site.attrs["activation"], quantize=bool(site.attrs["quantize"]),
        isa=_isa(site), knobs=knobs,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site)], outputs_of(site.result))


def _embed(emit: Emitter, site: Site, knobs: Any) -> Var:
    (weight,) = _weights(site)
    kernel = once(embed, weight, site.weights[0].columns, _n(site), site.attrs["scale"])
    return emit.launch(kernel, [site.operands[0], *planes_of(site)], [site.result])


def _head_argmax(emit: Emitter, site: Site, knobs: Any) -> Var:
    kind, x, _ = activation_of(site)
    (weight,) = _weights(site)
    kernel = once(
        head_argmax,
        weight, site.weights[0].columns, _rows(site),
        activation=kind, isa=_isa(site), knobs=knobs, n_vocab=weight.rows,
    )  # fmt: skip
    return emit.launch(kernel, [*x, *planes_of(site)], [site.result])


def _block_norm(emit: Emitter, site: Site, knobs: Any) -> Var:
    a = site.attrs
    d = int(site.operands[0].ty.shape[1])
    kernel = once(
        rms_norm,
        d, _n(site), a["eps"],
        residual=bool(a["residual"]), post_norm=bool(a["post_norm"]), quantize=bool(a["quantize"]),
    )  # fmt: skip
    return nested(emit, emit.launch(kernel, site.operands, outputs_of(site.result)), site.result)


def _quantize(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(quantize, int(site.operands[0].ty.shape[1]), _n(site))
    return emit.launch(kernel, site.operands, outputs_of(site.result))


def _rope_table(emit: Emitter, site: Site, knobs: Any) -> Var:
    n_rot = 2 * int(site.operands[1].ty.shape[0])
    return emit.launch(
        once(rope_table, n_rot, _n(site), site.attrs["mscale"]), site.operands, [site.result]
    )


def _qk_prep(emit: Emitter, site: Site, knobs: Any) -> Var:
    a, joined = site.attrs, bool(site.attrs["joined"])
    table = site.operands[1 if joined else 3]
    job = QkPrep(
        a["heads"], a["kv_heads"], a["head_dim"], int(table.ty.shape[1]), a["pairing"],
        eps=a["eps"] if a["norm"] else None, kv_dtype=site.kv_dtype,
        block_tokens=site.block_tokens, joined=joined,
    )  # fmt: skip
    q, *pool = site.result.fields
    inputs, count = len(site.operands), len(pool)
    done = emit.launch_in_place(
        once(qk_prep, job, _n(site)), site.operands, [*pool, q],
        [*range(inputs - count, inputs), -1],
    )  # fmt: skip
    return emit.emit(relax.Tuple([emit.item(done, i) for i in (count, *range(count))]))


def _attention_job(site: Site) -> Attention:
    a = site.attrs
    return Attention(
        a["heads"], a["kv_heads"], a["head_dim"],
        scale=a["scale"], window=a["window"], softcap=a["softcap"] or None,
        kv_dtype=site.kv_dtype, block_tokens=site.block_tokens,
    )  # fmt: skip


def _attention_decode(emit: Emitter, site: Site, knobs: Any) -> Var:
    q, *pool, positions, tiles, work, block_table = site.operands
    job = _attention_job(site)
    items = work.ty.shape[0]
    acc = relax.TensorType([items, job.heads, job.head_dim], "float32")
    ml = relax.TensorType([items, job.heads, 2], "float32")
    parts = emit.launch(
        once(attention_split, job, _n(site), knobs),
        [q, positions, work, block_table, *pool],
        [acc, ml],
    )
    kernel = once(attention_reduce, job, _n(site), quantize=bool(site.attrs["quantize"]))
    return emit.launch(
        kernel, [emit.item(parts, 0), emit.item(parts, 1), tiles], outputs_of(site.result)
    )


def _attention_prefill(emit: Emitter, site: Site, knobs: Any) -> Var:
    q, *pool, positions, tiles, work, block_table = site.operands
    job = _attention_job(site)
    rows = relax.TensorType(list(q.ty.shape), "float32")
    kernel = once(attention_prefill, job, _n(site), knobs=knobs)
    out = emit.launch(kernel, [q, positions, tiles, work, block_table, *pool], [rows])
    if not site.attrs["quantize"]:
        return out
    return emit.launch(once(quantize, int(q.ty.shape[1]), _n(site)), [out], outputs_of(site.result))


def _argmax(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(select.argmax, int(site.operands[0].ty.shape[1]), _rows(site))
    return emit.launch(kernel, site.operands, [site.result])


def _take_rows(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(select.take_rows, int(site.operands[0].ty.shape[1]), _n(site), _rows(site))
    return emit.launch(kernel, site.operands, [site.result])


def _softcap(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(select.softcap, int(site.operands[0].ty.shape[1]), _rows(site), site.attrs["cap"])
    return emit.launch(kernel, site.operands, [site.result])


def _add(emit: Emitter, site: Site, knobs: Any) -> Var:
    kernel = once(residual_add, int(site.operands[0].ty.shape[1]), _n(site), 0.0)
    return emit.launch(kernel, site.operands, [site.result])


def _rows(site: Site) -> int | None:
    """Rows of the result that kernels are made for."""
    rows = result_rows(site)
    return None if rows is None else _fixed(rows)


def _always(site: Site) -> bool:
    return True


def _decodes(site: Site) -> bool:
    return site.n is not None


def _quantised_rows_are_whole(site: Site) -> bool:
    return not site.attrs["quantize"] or site.attrs["rows"] % 32 == 0


def _two_rows_of_eights(site: Site) -> bool:
    shape = site.operands[1].ty.shape
    return len(shape) == 2 and int(shape[1]) % 8 == 0


SCHEDULES: tuple[Schedule, ...] = (
    Schedule("linear_x8", "linear", _always, _linear, LinearKnobs, linear_space),
    Schedule("linear_x8", "linear_group", _always, _linear, LinearKnobs, linear_space),
    Schedule(
        "gate_up_x8", "gate_up", _quantised_rows_are_whole, _gate_up, LinearKnobs, linear_space
    ),
    Schedule("embed_x8", "embed", _always, _embed),
    Schedule("head_argmax_x8", "head_argmax", _always, _head_argmax, LinearKnobs, linear_space),
    Schedule("block_norm", "block_norm", _always, _block_norm),
    Schedule("quantize", "quantize", _always, _quantize),
    Schedule("rope_table", "rope_table", _always, _rope_table),
    Schedule("qk_prep", "qk_prep", _always, _qk_prep),
    Schedule(
        "attention_split", "attention", _decodes, _attention_decode, AttentionKnobs, attention_space
    ),
    Schedule(
        "attention_tiled", "attention", _always, _attention_prefill, AttentionKnobs, attention_space
    ),
    Schedule("argmax", "argmax", _always, _argmax),
    Schedule("take_rows", "take_rows", _always, _take_rows),
    Schedule("softcap", "softcap", _always, _softcap),
    Schedule("add", "add", _two_rows_of_eights, _add),
)
