"""From loops to kernels: TVM's lowering for a module of both its dialects.

The kernels of `schedules/cuda` are tirx, which names warps, lanes and PTX. The target-free kernels
of `codegen/kernels`, for what has no schedule yet, are s_tir: loops that TVM's default schedule
binds to threads. TVM has a pipeline for each dialect that refuses the other, so a module is split,
each half lowered by its own, and joined.
"""

from __future__ import annotations

from typing import Any

from tvm import IRModule, transform
from tvm.s_tir import dlight
from tvm.tirx import PrimFunc, compilation_pipeline, get_tir_pipeline, register_tir_pipeline

PIPELINE = "xpuc"


def bind_threads(module: IRModule, target: Any) -> IRModule:
    """The module with its target-free kernels scheduled for a GPU: correct, not fast."""
    with target:
        return dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(module)


def register() -> None:
    """Have TVM know the pipeline by its name, which is all its build functions take."""
    register_tir_pipeline(PIPELINE, _both_dialects)


def _both_dialects() -> tuple[Any, Any, Any]:
    """The lowering, then the last passes of the host's functions and of the device's."""

    def lower(module: IRModule, _context: Any) -> IRModule:
        halves: dict[str, dict[Any, Any]] = {"tirx": {}, "s_tir": {}}
        lowered = IRModule({}, attrs=module.attrs)
        for gv, f in module.functions_items():
            if isinstance(f, PrimFunc):
                halves["s_tir" if _is_s_tir(f) else "tirx"][gv] = f
            else:
                lowered[gv] = f
        for dialect, functions in halves.items():
            if functions:
                passes, *_ = get_tir_pipeline(dialect)
                lowered.update(passes(IRModule(functions, attrs=module.attrs)))
        return lowered

    return (
        transform.module_pass(lower, opt_level=0, name="both_dialects"),
        compilation_pipeline.finalize_host_passes,
        compilation_pipeline.finalize_device_passes,
    )


def _is_s_tir(function: PrimFunc) -> bool:
    return function.attrs is not None and bool(function.attrs.get("s_tir", False))
