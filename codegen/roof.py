"""The loop that measures a machine's int8 peak, in every artifact: see schedules/llvm/peak.py."""

from __future__ import annotations

from typing import Any

from tvm import relax

from xpuc.codegen.lower import Lowered
from xpuc.ir import ops
from xpuc.schedules.llvm import peak
from xpuc.schedules.llvm.isa import isa_for


def add_int8_peak(lowered: Lowered) -> dict[str, Any]:
    """Add the function `int8_peak` (x int32 (8,)) to the module; its facts for the manifest.

    Nothing where the target has no byte products.
    """
    isa = isa_for(lowered.plan.target.features)
    kernel = peak.int8_peak(isa)
    if kernel is None:
        return {}
    x = relax.Var("x", ops.tensor((8,), "int32"))
    with lowered.builder.function(peak.NAME, [x], attrs={"global_symbol": peak.NAME}):
        with lowered.builder.dataflow():
            result = ops.tensor((peak.CHUNKS, 8), "int32")
            loop = lowered.add_kernel(kernel.with_attr("global_symbol", f"{peak.NAME}_loop"))
            called = relax.call_tir(loop, [x], [result])
            out = lowered.builder.emit_output(called)
        lowered.builder.emit_func_output(out)
    return {peak.NAME: {"operations": peak.operations(isa)}}
