"""Kernels without a schedule of the GPU's, bound to threads by TVM's default one, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as ops
import tvm
from emu.device import MACHINE, Out, run
from expectations import close, same

from xpuc.codegen import cuda
from xpuc.codegen.kernels.activation import gelu_tanh, softcap
from xpuc.codegen.kernels.argmax import argmax
from xpuc.codegen.kernels.rms_norm import rms_norm

RNG = np.random.default_rng(8)
X = (3 * RNG.standard_normal((5, 192))).astype(np.float32)
each_n = pytest.mark.parametrize("n", [5, None], ids=["static", "symbolic"])


def bound(kernel):
    """The kernel as a library has it."""
    name = kernel.attrs["global_symbol"]
    module = cuda.bind_threads(tvm.IRModule({name: kernel}), MACHINE.tvm)
    return module[name]


@each_n
def test_elementwise(n):
    for kernel, expected in (
        (gelu_tanh(192, n), ops.gelu_tanh(X)),
        (softcap(192, n, 2.0), ops.softcap(X, 2.0)),
    ):
        (y,) = run(bound(kernel), X, Out(X.shape, "float32"))
        close(y, expected, 1e-6)


@each_n
def test_a_norm_is_several_launches(n):
    (y,) = run(bound(rms_norm(64, n, 1e-5, 3)), X, Out(X.shape, "float32"))
    rows = X.reshape(5, 3, 64)
    expected = ops.rms_norm(rows, np.ones(64, np.float32), 1e-5).reshape(X.shape)
    close(y, expected, 1e-6)


@each_n
def test_the_first_of_equal_logits_wins(n):
    logits = X.copy()
    logits[1, [7, 100]] = 99
    (tokens,) = run(bound(argmax(192, n)), logits, Out((5,), "int32"))
    same(tokens, logits.argmax(1))
