"""Kernels on the emulated GPU, built as xpuc builds them, for the tests of this folder.

y, = run(kernel, x, Out((n,), "float32"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
from emu import compiler, fake_driver

from xpuc.codegen import cuda
from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.codegen.target import resolve

fake_driver.load()  # conftest.py did, before tvm

ARCHS = ("sm_90a",)
observers: list[Callable[[Any, tuple[Any, ...], list[Any]], object]] = []  # see `run`
MACHINE = resolve("cuda -arch=" + ",".join(ARCHS))


class Emulator:
    """A `codegen.cuda.compiler.Compiler` for the emulated GPU."""

    name = "g++ for the emulated GPU"

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        return Fatbin(compiler.compile_cuda(source), (), source)


@contextmanager
def emulated() -> Iterator[None]:
    """TVM builds inside `with` make code for the emulated GPU."""
    with MACHINE.tvm, cuda.compiling(ARCHS, Emulator()):
        yield


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


def build(*functions: Any) -> Any:
    """An executable of some PrimFuncs, which are called by their names."""
    module = tvm.IRModule({f.attrs["global_symbol"]: f for f in functions})
    with emulated():
        return tvm.compile(module, target=MACHINE.tvm, tir_pipeline=cuda.PIPELINE)


@lru_cache(maxsize=8)
def _built(kernel: Any) -> Any:
    return build(kernel)[kernel.attrs["global_symbol"]]


def run(function: Any, *arguments: Any) -> list[np.ndarray]:
    """The contents of its Out and InOut arguments after one call of a kernel.

    A PrimFunc, or one that is built already. Called in every order of threads; what it gives must
    not depend on it. The other arguments are arrays, which it may not change, and scalars.
    The observers are told of each call of a PrimFunc.
    """
    kernel = function if isinstance(function, tvm.tirx.PrimFunc) else None
    if kernel is not None:
        function = _built(kernel)
    results = []
    for order in fake_driver.ORDERS:
        with _environment("XPUC_EMU_ORDER", order):
            results.append(call(function, *arguments))
    for order, other in zip(fake_driver.ORDERS[1:], results[1:], strict=True):
        for i, (a, b) in enumerate(zip(results[0], other, strict=True)):
            assert a.tobytes() == b.tobytes(), f"result {i} differs with threads in {order} order"
    if kernel is not None:
        for observer in observers:
            observer(kernel, arguments, results[0])
    return results[0]


def call(function: Any, *arguments: Any) -> list[np.ndarray]:
    """`run` of a built kernel, in one order of threads."""
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
