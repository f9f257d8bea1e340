"""The loops that measure a machine's limits, in every artifact: a machine that only runs artifacts
has no compiler to make them with."""

from __future__ import annotations

from typing import Any

from tvm import relax

from xpuc.codegen.lower import Lowered
from xpuc.ir import ops, scope
from xpuc.schedules import RoofLoop, target_of


def add_roofs(lowered: Lowered) -> dict[str, Any]:
    """Add the loops of the target; what the manifest says of them: elements, and what a call is."""
    facts = lowered.plan.target
    loops = target_of(facts.kind).roof_loops(facts)
    for loop in loops:
        _add(lowered, loop)
    return {loop.name: {"elements": loop.elements, **loop.facts} for loop in loops}


def _add(lowered: Lowered, loop: RoofLoop) -> None:
    """A function of one int32 vector that launches the kernel."""
    x = relax.Var("x", ops.tensor((loop.elements,), "int32"))
    with scope.function(lowered.builder, loop.name, [x]):
        with lowered.builder.dataflow():
            named = loop.kernel.with_attr("global_symbol", f"{loop.name}_loop")
            kernel = lowered.add_kernel(named)
            called = relax.call_tir(kernel, [x], [ops.tensor(loop.result, "int32")])
            out = lowered.builder.emit_output(called)
        lowered.builder.emit_func_output(out)
