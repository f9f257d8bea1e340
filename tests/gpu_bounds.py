"""Kernels of every schedule of the GPU at the shapes of an 8B model, and what each may take.

    python tests/gpu_bounds.py --write "why a bound is raised"

renews codegen/gpu_bounds.json: registers as they are today and 8 more. A bound that is there is
kept where the kernel still keeps it; one that is raised gets the reason given. No kernel spills.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import IRModule, tirx

from xpuc.codegen import cuda
from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.target import resolve
from xpuc.schedules.attention_job import QkPrepJob
from xpuc.schedules.cuda import matmul_hopper
from xpuc.schedules.cuda.activation_rows import widen_rows
from xpuc.schedules.cuda.argmax import argmax, best_of_blocks, head_best, head_blocks
from xpuc.schedules.cuda.attention import Attention, attention_decode
from xpuc.schedules.cuda.attention_prefill import attention_prefill
from xpuc.schedules.cuda.elementwise import residual_add, rope_table, softcap, take_rows, zeros
from xpuc.schedules.cuda.embed import embed
from xpuc.schedules.cuda.gate_up import gate_up
from xpuc.schedules.cuda.int8_matmul import int8_gated_matmul, int8_matmul
from xpuc.schedules.cuda.linear import linear
from xpuc.schedules.cuda.matmul import gated_matmul, matmul
from xpuc.schedules.cuda.norm import rms_norm
from xpuc.schedules.cuda.products import Weight
from xpuc.schedules.cuda.quantize import quantize
from xpuc.schedules.cuda.regroup import regroup
from xpuc.schedules.cuda.rope import qk_prep
from xpuc.schedules.cuda.sample import group_best, sample
from xpuc.schedules.cuda.widen import INSTRUCTIONS, widen
from xpuc.schedules.packed import FORMATS, packed

BOUNDS = Path(__file__).parent / "codegen" / "gpu_bounds.json"
ARCHS = ("sm_80", "sm_90a")
HOPPER = ("sm_90a",)
SLACK = 8  # registers that another release of the compiler may take

D_MODEL, D_FF, N_VOCAB = 4096, 14336, 128256
ROWS = (1, 8)  # of a decode step
HEAD_SIZES = (64, 128, 256)
QUANTISED = tuple(f for f in FORMATS if packed(f).is_quantised)
FLOATS = tuple(f for f in FORMATS if not packed(f).is_quantised)


@dataclass(frozen=True)
class Bound:
    """What a kernel may take on one architecture; `reason` is why, where it was raised."""

    registers: int
    reason: str | None = None

    def holds(self, usage: KernelUsage) -> bool:
        """Whether a kernel keeps it."""
        return usage.registers <= self.registers and not spills(usage)

    @staticmethod
    def of(usage: KernelUsage, reason: str | None) -> Bound:
        """For a kernel as it is today."""
        return Bound(usage.registers + SLACK, reason)


def spills(usage: KernelUsage) -> bool:
    """Whether a kernel keeps registers in memory."""
    return bool(usage.spill_store_bytes or usage.spill_load_bytes)


def kernels() -> list[tirx.PrimFunc]:
    """Those of every schedule of schedules/cuda."""
    return [*_mat_vecs(), *_products(), *_attentions(), *_small()]


def hopper_kernels() -> list[tirx.PrimFunc]:
    """Those of schedules that need a target of `HOPPER` alone."""
    return [*_hopper_products()]


def mat_vec(format: str, rows: int) -> tirx.PrimFunc:
    """A square projection of a decode step."""
    return linear([Weight(format, D_MODEL)], D_MODEL, rows, activation=_kind(format))


def name_of(kernel: tirx.PrimFunc) -> str:
    """The kernel's in machine code."""
    return f"{kernel.attrs['global_symbol']}_kernel"


def compiled(functions: list[tirx.PrimFunc], archs: Sequence[str] = ARCHS) -> Fatbin:
    """Their code."""
    machine = resolve("cuda -arch=" + ",".join(archs))
    module = IRModule({str(f.attrs["global_symbol"]): f for f in functions})
    with machine.tvm, cuda.compiling(machine.archs) as made:
        tvm.compile(module, target=machine.tvm, tir_pipeline=cuda.PIPELINE)
    (fatbin,) = made.fatbins
    return fatbin


def read() -> dict[tuple[str, str], Bound]:
    """The bounds by kernel and architecture."""
    stored: dict[str, Any] = json.loads(BOUNDS.read_text())
    return {
        (kernel, arch): Bound(**facts)
        for kernel, by_arch in stored.items()
        for arch, facts in by_arch.items()
    }


def write(usage: Sequence[KernelUsage], reason: str | None) -> None:
    """Renew the file; a bound is not raised without a reason."""
    before = read() if BOUNDS.exists() else {}
    bounds: dict[str, dict[str, Any]] = {}
    for row in sorted(usage, key=lambda row: (row.kernel, row.arch)):
        bound = before.get((row.kernel, row.arch))
        if bound is None:
            bound = Bound.of(row, None)
        elif not bound.holds(row):
            if reason is None:
                sys.exit(f"{row} is over {bound}: give a reason for raising it")
            bound = Bound.of(row, reason)
        facts = {name: value for name, value in asdict(bound).items() if value is not None}
        bounds.setdefault(row.kernel, {})[row.arch] = facts
    BOUNDS.write_text(json.dumps(bounds, indent=1) + "\n")


def _kind(format: str) -> str:
    return "q8" if packed(format).is_quantised else "f32"


def _mat_vecs() -> Iterator[tirx.PrimFunc]:
    for format in QUANTISED:
        for rows in ROWS:
            yield mat_vec(format, rows)
    for format in FLOATS:
        yield mat_vec(format, 1)
    for format, rows in (("Q4_0", 1), ("Q4_0", 8), ("Q4_K", 1), ("Q6_K", 1), ("Q8_0", 1)):
        pair = Weight(format, D_FF), Weight(format, D_FF)
        yield gate_up(*pair, D_MODEL, rows, activation="q8", act="silu", quantize=True)
    for format in ("Q4_K", "Q6_K", "Q8_0"):
        yield head_best(Weight(format, N_VOCAB), D_MODEL, 1, activation="q8")
    yield embed(Weight("Q4_K", N_VOCAB), D_MODEL, None, 1.0)
    q, kv = Weight("Q4_K", D_MODEL), Weight("Q4_K", 1024)
    yield linear([q, kv, Weight("Q6_K", 1024)], D_MODEL, 1, activation="q8", bias=(True,) * 3)
    yield linear([q], D_MODEL, None, activation="q8")


def _products() -> Iterator[tirx.PrimFunc]:
    for format in ("F16", "Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        yield matmul([Weight(format, D_MODEL)], D_MODEL, activation=_kind(format))
    for format in ("Q4_1", "Q4_K"):
        pair = Weight(format, D_FF), Weight(format, D_FF)
        yield gated_matmul(*pair, D_MODEL, activation="q8", act="silu")
    for format in INSTRUCTIONS:
        yield int8_matmul([Weight(format, D_MODEL)], D_MODEL)
        yield widen(format)
    for format in ("Q4_K", "Q5_K"):
        kv, ff = Weight(format, 1024), Weight(format, D_FF)
        yield int8_matmul([Weight(format, D_MODEL), kv, kv], D_MODEL)
        yield int8_gated_matmul(ff, ff, D_MODEL, act="silu")
    yield regroup(D_FF)


def _hopper_products() -> Iterator[tirx.PrimFunc]:
    for format in FORMATS:
        if format != "F32":
            yield matmul_hopper.matmul([Weight(format, D_MODEL)], D_MODEL)
    for formats in (("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("BF16", "BF16")):
        gate, up = (Weight(format, D_FF) for format in formats)
        yield matmul_hopper.gated_matmul(gate, up, D_MODEL, act="silu")
    q, k, v = Weight("Q4_K", D_MODEL), Weight("Q4_K", 1024), Weight("Q6_K", 1024)
    yield matmul_hopper.matmul([q, k, v], D_MODEL, bias=(True,) * 3)
    for activation in ("q8", "f32"):
        yield widen_rows(D_MODEL, activation=activation)


def _attentions() -> Iterator[tirx.PrimFunc]:
    for head_dim in HEAD_SIZES:
        job = Attention(32, 8, head_dim, scale=head_dim**-0.5)
        yield attention_decode(job, 1, quantize=True)
        yield attention_prefill(job, None)
        yield qk_prep(QkPrepJob(32, 8, head_dim, head_dim, "neox", eps=1e-6), None)
    for heads, kv_heads, head_dim in ((32, 8, 128), (9, 3, 64), (4, 1, 256)):
        job = Attention(heads, kv_heads, head_dim, head_dim**-0.5, kv_dtype="q8_0")
        yield attention_decode(job, 1, quantize=True)
        yield attention_prefill(job, None)
        pairing = QkPrepJob(heads, kv_heads, head_dim, head_dim, "neox", kv_dtype="q8_0")
        yield qk_prep(pairing, None)
    yield qk_prep(QkPrepJob(32, 8, 128, 128, "norm"), 1)
    gemma = Attention(8, 4, 256, scale=1 / 16, window=1024, softcap=50.0)
    yield attention_decode(gemma, 1, quantize=True)


def _small() -> Iterator[tirx.PrimFunc]:
    yield rms_norm(D_MODEL, 1, 1e-5, quantize=True)
    yield rms_norm(D_MODEL, 1, 1e-5, residual=True, quantize=True)
    yield rms_norm(D_MODEL, 1, 1e-5, residual=True, post_norm=True, quantize=True)
    yield quantize(D_FF, 1)
    yield argmax(N_VOCAB, 1)
    yield group_best(N_VOCAB)
    yield sample(N_VOCAB)
    yield best_of_blocks(head_blocks(N_VOCAB), 1)
    yield rope_table(128, 1)
    yield take_rows(D_MODEL, None, None)
    yield softcap(N_VOCAB, 1, 30.0)
    yield residual_add(D_MODEL, 1)
    yield zeros(8, 1, "int32")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    usage = (*compiled(kernels()).usage, *compiled(hopper_kernels(), HOPPER).usage)
    write(usage, sys.argv[2] if len(sys.argv) > 2 else None)
