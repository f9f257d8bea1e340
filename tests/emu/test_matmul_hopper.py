"""Projections of many rows by warpgroups, on the emulated GPU, rows and columns left over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emu.device import Out, run
from emu.gpu_weights import activation, matrix
from expectations import close, same

from xpuc.schedules.cuda.activation_rows import widen_rows, widened_columns
from xpuc.schedules.cuda.matmul_hopper import HopperKnobs, gated_matmul, matmul
from xpuc.schedules.packed import FORMATS, packed

SMALL = HopperKnobs(rows=16, warpgroups=1, stages=2)
ACTS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def widened(kind: str, n: int, k: int) -> tuple[Any, Any]:
    """Activations of n rows as the products take them, and the values they stand for."""
    x, values = activation(kind, n, k)
    out = Out((n, widened_columns(k)), "float16")
    (wide,) = run(widen_rows(k, activation=kind), *x, out)
    steps = np.zeros((n, widened_columns(k)), np.float16)
    steps[:, :k] = values.astype(np.float32)  # the kernel rounds twice
    by_lane = steps.reshape(n, -1, 4, 8, 2, 2)  # step, lane, product, half, pair
    same(wide, by_lane.transpose(0, 1, 3, 4, 2, 5).reshape(n, -1))
    return wide, values


@pytest.mark.parametrize("kind", ["q8", "f32"])
def test_widened_rows_are_the_activation_in_the_order_of_the_lanes(kind: str) -> None:
    widened(kind, 19, 160)  # the second step has one sub-block


def product(parts: list[Any], n: int, k: int, knobs: HopperKnobs, **options: Any) -> Any:
    """What the matrices side by side give, and what they should."""
    wide, values = widened("q8", n, k)
    kernel = matmul([p.weight for p in parts], k, knobs=knobs, **options)
    rows = sum(p.weight.rows for p in parts)
    bias = np.random.default_rng(0).standard_normal(parts[-1].weight.rows).astype(np.float32)
    biases = [bias] if options else []
    planes = [a for p in parts for a in p.planes]
    (got,) = run(kernel, wide, *planes, *biases, Out((n, rows), "float32"))
    want = values @ np.concatenate([p.values for p in parts]).T
    if options:
        want[:, -len(bias) :] += bias
    return got, want


@pytest.mark.parametrize("columns", [1, 32, 256])
def test_every_format(columns: int) -> None:
    formats = [f for f in FORMATS if packed(f).columns == columns and f != "F32"]
    n, rows, k = 37, 70, 512 if columns == 256 else 416
    parts = [matrix(f, rows, k, i) for i, f in enumerate(formats)]
    got, want = product(parts, n, k, SMALL)
    for i in range(len(formats)):
        here = slice(rows * i, rows * (i + 1))
        close(got[:, here], want[:, here], 1e-3)


@pytest.mark.parametrize("n", [3, 150])
def test_several_matrices_with_a_bias(n: int) -> None:
    parts = [matrix("Q4_K", 140, 256, 1), matrix("Q8_0", 40, 256, 2)]
    got, want = product(parts, n, 256, HopperKnobs(), bias=(False, True))
    close(got, want, 1e-3)


@pytest.mark.parametrize("act", ACTS)
def test_gate_and_up(act: str) -> None:
    n, rows, k = 21, 85, 512
    gate, up = matrix("Q4_K", rows, k, 1), matrix("Q6_K", rows, k, 2)
    wide, values = widened("q8", n, k)
    kernel = gated_matmul(gate.weight, up.weight, k, act=act, knobs=SMALL)
    (got,) = run(kernel, wide, *gate.planes, *up.planes, Out((n, rows), "float32"))
    want = ACTS[act](values @ gate.values.T) * (values @ up.values.T)
    close(got, want, 1e-3)


def test_knobs_change_no_bit() -> None:
    n, k = 20, 384
    part = matrix("Q5_1", 130, k)
    results = []
    for knobs in (SMALL, HopperKnobs(rows=24, warpgroups=2, stages=3, parts=2)):
        got, want = product([part], n, k, knobs)
        close(got, want, 1e-3)
        results.append(got.tobytes())
    assert results[0] == results[1]
