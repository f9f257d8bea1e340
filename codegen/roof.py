"""The loops that measure a machine's limits, in every artifact: a machine that only runs artifacts
has no compiler to make them with."""

from __future__ import annotations

from typing import Any

from tvm import relax

from xpuc.codegen.lower import Lowered
from xpuc.ir import ops
from xpuc.schedules.llvm import peak, read
from xpuc.schedules.llvm.isa import isa_for

_READ_BYTES, _PARTS = 128 << 20, 256  # well beyond any cache


def add_roofs(lowered: Lowered) -> dict[str, Any]:
    """Add `memory_read` (w int32) and, where the target has byte products, `int8_peak` (x int32).

    What the manifest says of them: the elements of the operand, and the bytes or operations of a
    call.
    """
    read_kernel = read.memory_read(_READ_BYTES, _PARTS)
    _add(lowered, read.NAME, read_kernel, _READ_BYTES // 4, (_PARTS * read.LANES,))
    facts = {read.NAME: {"elements": _READ_BYTES // 4, "bytes": _READ_BYTES}}
    isa = isa_for(lowered.plan.target.features)
    peak_kernel = peak.int8_peak(isa)
    if peak_kernel is not None:
        _add(lowered, peak.NAME, peak_kernel, read.LANES, (peak.CHUNKS, read.LANES))
        facts[peak.NAME] = {"elements": read.LANES, "operations": peak.operations(isa)}
    return facts


def _add(lowered: Lowered, name: str, kernel: Any, elements: int, result: tuple[int, ...]) -> None:
    """A function of one int32 vector that launches the kernel."""
    x = relax.Var("x", ops.tensor((elements,), "int32"))
    with lowered.builder.function(name, [x], attrs={"global_symbol": name}):
        with lowered.builder.dataflow():
            loop = lowered.add_kernel(kernel.with_attr("global_symbol", f"{name}_loop"))
            called = relax.call_tir(loop, [x], [ops.tensor(result, "int32")])
            out = lowered.builder.emit_output(called)
        lowered.builder.emit_func_output(out)
