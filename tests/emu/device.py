"""Kernels on the emulated GPU through TVM, for the tests of this folder.

y, = run(kernel, x, Out((n,), "float32"))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from emu import fake_driver

fake_driver.compile_with_emulator()

ARCH = "sm_90a"


@dataclass(frozen=True)
class Out:
    """An argument a kernel writes, uninitialised (poison) before."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class InOut:
    """An argument a kernel changes in place."""

    array: np.ndarray


def device() -> Any:
    """The emulated GPU."""
    found = tvm.cuda(0)
    assert found.exist, "TVM does not see the fake driver"
    return found


def target() -> Any:
    """The TVM target of the emulated GPU, its host this machine's CPU."""
    kind = {
        "kind": "cuda",
        "arch": ARCH,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 48 * 1024,
        "thread_warp_size": 32,
    }
    return tvm.target.Target(kind, host={"kind": "llvm"})


def build(functions: Any) -> Any:
    """An executable of one PrimFunc or of an IRModule of them."""
    if not isinstance(functions, tvm.IRModule):
        functions = tvm.IRModule({functions.attrs["global_symbol"]: functions})
    with target():
        return tvm.compile(functions, target=target(), tir_pipeline=pipeline())


def run(function: Any, *arguments: Any) -> list[np.ndarray]:
    """The contents of its Out and InOut arguments after one call of a kernel.

    A PrimFunc, or one that is built already. Called in every order of threads; what it gives must
    not depend on it. The other arguments are arrays, which it may not change, and scalars.
    """
    if isinstance(function, tvm.tirx.PrimFunc):
        function = build(function)[function.attrs["global_symbol"]]
    results = []
    for order in fake_driver.ORDERS:
        with _environment("XPUC_EMU_ORDER", order):
            results.append(_call(function, arguments))
    for order, other in zip(fake_driver.ORDERS[1:], results[1:], strict=True):
        for i, (a, b) in enumerate(zip(results[0], other, strict=True)):
            assert a.tobytes() == b.tobytes(), f"result {i} differs with threads in {order} order"
    return results[0]


def _call(function: Any, arguments: tuple[Any, ...]) -> list[np.ndarray]:
    given = [_tensor(argument) for argument in arguments]
    function(*given)
    device().sync()
    written = []
    for argument, tensor in zip(arguments, given, strict=True):
        if isinstance(argument, Out | InOut):
            written.append(tensor.numpy())
        elif isinstance(argument, np.ndarray):
            same = tensor.numpy().tobytes() == argument.tobytes()
            assert same, "the kernel changed one of its inputs"
    return written


def _tensor(argument: Any) -> Any:
    if isinstance(argument, Out):
        return tvm.runtime.empty(argument.shape, argument.dtype, device())
    if isinstance(argument, InOut):
        argument = argument.array
    if isinstance(argument, np.ndarray):
        return tvm.runtime.tensor(np.ascontiguousarray(argument), device())
    return argument


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def pipeline() -> str:
    """The lowering of a module that holds both of TVM's dialects."""
    from tvm.tirx import compilation_pipeline as pipelines

    def lower(module: Any, _context: Any) -> Any:
        out = tvm.IRModule({}, attrs=module.attrs)
        for name, wanted in (("s_tir", True), ("tirx", False)):
            part = {
                gv: f
                for gv, f in module.functions_items()
                if isinstance(f, tvm.tirx.PrimFunc) and bool(f.attrs.get("s_tir", False)) == wanted
            }
            if part:
                passes, *_ = pipelines.PIPELINE_MAP[name]()
                out.update(passes(tvm.IRModule(part, attrs=module.attrs)))
        for gv, f in module.functions_items():
            if not isinstance(f, tvm.tirx.PrimFunc):
                out[gv] = f
        return out

    def factory() -> Any:
        lowering = tvm.transform.module_pass(lower, opt_level=0)
        return lowering, pipelines.finalize_host_passes, pipelines.finalize_device_passes

    pipelines.register_tir_pipeline("emu", factory)
    return "emu"
