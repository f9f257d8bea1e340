"""Kernels compiled and called on numpy arrays, for the tests of schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

os.environ.setdefault("TVM_NUM_THREADS", "2")  # read once, when the first kernel runs

import tvm

Kernel = Callable[..., None]


def build(func: Any) -> Kernel:
    """Compile one PrimFunc for an AVX2 machine."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
    kernel: Kernel = tvm.compile(func, target=target)[func.attrs["global_symbol"]]
    return kernel


def call(
    kernel: Kernel, inputs: Sequence[Any], outputs: Sequence[tuple[tuple[int, ...], str]]
) -> list[Any]:
    """The outputs of a kernel, which finds 77 in all of their elements.

    Inputs that are already device tensors are passed as they are, so a kernel can write into them.
    """
    given = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in inputs]
    results = [tvm.runtime.tensor(np.full(shape, 77, dtype)) for shape, dtype in outputs]
    kernel(*given, *results)
    return [r.numpy() for r in results]
