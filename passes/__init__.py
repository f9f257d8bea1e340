"""Module to module: the pipeline of graph rewrites. Read PIPELINE first; its order is meaning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tvm import IRModule

from xpuc.errors import UnsupportedError, nearest
from xpuc.passes import (
    fuse_gate_up,
    fuse_norm_mul,
    fuse_norm_residual,
    fuse_qkv,
    fuse_quantize,
    fuse_rope_kv,
    fuse_tail,
    hoist_take_rows,
    quantize_activations,
)
from xpuc.passes.rewrite import Report, Visit, rewrite


@dataclass(frozen=True)
class Pass:
    """A rewrite with a name; the module is well formed before it and after it."""

    name: str
    visit: Visit

    def __call__(self, module: IRModule) -> tuple[IRModule, Report]:
        return rewrite(module, self.visit)


PIPELINE: tuple[Pass, ...] = (
    # First, as it knows the operations of the paper only.
    Pass("hoist_take_rows", hoist_take_rows.visit),
    Pass("fuse_gate_up", fuse_gate_up.visit),
    Pass("fuse_qkv", fuse_qkv.visit),
    Pass("fuse_rope_kv", fuse_rope_kv.visit),
    # After fuse_rope_kv: the norm of a layer's only K/V head looks like the norm of a whole row.
    Pass("fuse_norm_mul", fuse_norm_mul.visit),
    Pass("fuse_norm_residual", fuse_norm_residual.visit),
    Pass("quantize_activations", quantize_activations.visit),
    Pass("fuse_quantize", fuse_quantize.visit),
    Pass("fuse_tail", fuse_tail.visit),
)
FUSIONS: tuple[str, ...] = tuple(p.name for p in PIPELINE if p.name.startswith("fuse_"))

Between = Callable[[int, str, IRModule], None]


def named(name: str) -> Pass:
    """The pass of this name."""
    for p in PIPELINE:
        if p.name == name:
            return p
    raise UnsupportedError(f"unknown pass: {name!r}", nearest(name, [p.name for p in PIPELINE]))


def without(names: Collection[str]) -> tuple[Pass, ...]:
    """The pipeline less the named passes."""
    for name in names:
        named(name)
    return tuple(p for p in PIPELINE if p.name not in names)


def run(
    module: IRModule, pipeline: Iterable[Pass] = PIPELINE, between: Between | None = None
) -> tuple[IRModule, dict[str, Report]]:
    """Run the passes in order; `between(number, name, module)` is called after each."""
    reports: dict[str, Report] = {}
    for number, step in enumerate(pipeline, start=1):
        module, reports[step.name] = step(module)
        if between is not None:
            between(number, step.name, module)
    return module, reports
