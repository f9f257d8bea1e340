"""Projections, the gated half of a feed-forward block and the output head, on the emulated GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from activations import q8a_shapes
from emu.device import Out, build, run
from emu.gpu_weights import activation, kind_of, matrix
from expectations import close, close_q8a, same

from xpuc.schedules.cuda import argmax, matmul
from xpuc.schedules.cuda.embed import embed
from xpuc.schedules.cuda.gate_up import gate_up
from xpuc.schedules.cuda.linear import LinearKnobs, linear
from xpuc.schedules.packed import FORMATS, packed

ROWS = 21  # no multiple of what a warp or a block takes
ACTS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def columns_of(format: str) -> int:
    return 512 if packed(format).columns == 256 else 160


def product(kernel: Any, inputs: list[Any], n: int, rows: int) -> Any:
    (y,) = run(kernel, *inputs, Out((n, rows), "float32"))
    return y


@pytest.mark.parametrize("format", FORMATS)
def test_a_projection_of_three_rows(format: str) -> None:
    k = columns_of(format)
    w = matrix(format, ROWS, k)
    x, values = activation(kind_of(format), 3, k)
    kernel = linear([w.weight], k, 3, activation=kind_of(format))
    got = product(kernel, [*x, *w.planes], 3, ROWS)
    close(got, values @ w.values.T, 1e-6)


@pytest.mark.parametrize("format", ["Q4_0", "Q6_K", "Q2_K", "IQ4_XS", "BF16"])
def test_a_row_has_the_same_bits_in_every_call(format: str) -> None:
    k, kind = columns_of(format), kind_of(format)
    w = matrix(format, ROWS, k)
    x, values = activation(kind, 11, k)

    def rows(first: int, last: int) -> list[Any]:
        return [np.ascontiguousarray(a[first:last] if kind == "f32" else a[:, first:last])
                for a in x]  # fmt: skip

    whole = product(linear([w.weight], k, None, activation=kind), [*x, *w.planes], 11, ROWS)
    close(whole, values @ w.values.T, 1e-6)
    for first, last in ((4, 5), (8, 11)):
        n = last - first
        for knobs in (LinearKnobs(), LinearKnobs(warps=2, rows=4)):
            kernel = linear([w.weight], k, n, activation=kind, knobs=knobs)
            part = product(kernel, [*rows(first, last), *w.planes], n, ROWS)
            close(part, values[first:last] @ w.values.T, 1e-6)
            np.testing.assert_array_equal(part, whole[first:last])


def test_several_matrices_side_by_side_with_biases() -> None:
    parts = [matrix("Q4_0", 21, 256, 1), matrix("Q6_K", 5, 256, 2), matrix("Q8_0", 32, 256, 3)]
    bias = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    x, values = activation("q8", 2, 256)
    kernel = linear([p.weight for p in parts], 256, 2, activation="q8", bias=(False, True, False))
    got = product(kernel, [*x, *(a for p in parts for a in p.planes), bias], 2, 58)
    want = values @ np.concatenate([p.values for p in parts]).T
    want[:, 21:26] += bias
    close(got, want, 1e-6)


@pytest.mark.parametrize("format", ["Q4_1", "Q5_K", "Q3_K"])
def test_exact_activations(format: str) -> None:
    k = columns_of(format)
    w = matrix(format, ROWS, k)
    x, values = activation("f32", 2, k)
    got = product(linear([w.weight], k, 2, activation="f32"), [*x, *w.planes], 2, ROWS)
    close(got, values @ w.values.T, 1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_projection_on_tensor_cores(format: str) -> None:
    n, rows, k = 70, 85, 256
    w = matrix(format, rows, k)
    x, values = activation(kind_of(format), n, k)
    kernel = matmul.matmul([w.weight], k, activation=kind_of(format))
    close(product(kernel, [*x, *w.planes], n, rows), values @ w.values.T, 1e-3)


def test_several_matrices_on_tensor_cores() -> None:
    parts = [matrix("Q4_K", 70, 256, 1), matrix("Q8_0", 40, 256, 2)]
    bias = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    x, values = activation("q8", 9, 256)
    knobs = matmul.MatmulKnobs(rows=32, columns=32, row_warps=1, column_warps=2)
    kernel = matmul.matmul(
        [p.weight for p in parts], 256, activation="q8", bias=(False, True), knobs=knobs
    )
    got = product(kernel, [*x, *(a for p in parts for a in p.planes), bias], 9, 110)
    want = values @ np.concatenate([p.values for p in parts]).T
    want[:, 70:] += bias
    close(got, want, 1e-3)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("n", [1, None])
def test_gate_and_up(act: str, n: int | None) -> None:
    rows = n or 9
    gate, up = matrix("Q4_0", 64, 160, 1), matrix("Q4_1", 64, 160, 2)
    x, values = activation("q8", rows, 160)
    want = ACTS[act](values @ gate.values.T) * (values @ up.values.T)
    inputs = [*x, *gate.planes, *up.planes]
    args = gate.weight, up.weight, 160, n
    got = product(gate_up(*args, activation="q8", act=act, quantize=False), inputs, rows, 64)
    close(got, want, 1e-5)
    outputs = [Out(*shape) for shape in q8a_shapes(64, rows)]
    quantised = run(gate_up(*args, activation="q8", act=act, quantize=True), *inputs, *outputs)
    close_q8a(quantised, want)


def test_gate_and_up_on_tensor_cores() -> None:
    gate, up = matrix("Q4_K", 85, 256, 1), matrix("Q6_K", 85, 256, 2)
    x, values = activation("q8", 70, 256)
    want = ACTS["silu"](values @ gate.values.T) * (values @ up.values.T)
    kernel = matmul.gated_matmul(gate.weight, up.weight, 256, activation="q8", act="silu")
    got = product(kernel, [*x, *gate.planes, *up.planes], 70, 85)
    close(got, want, 1e-3)


@pytest.mark.parametrize("n", [2, None])
def test_the_likeliest_of_the_head(n: int | None) -> None:
    rows, vocab, knobs = n or 9, 300, argmax.HeadKnobs(warps=8)
    w = matrix("Q6_K", vocab, 256)
    x, values = activation("q8", rows, 256)
    blocks, taken = argmax.head_blocks(vocab, knobs), knobs.block_rows * knobs.passes
    found = [Out((rows, blocks), "float32"), Out((rows, blocks), "int32")]
    head = argmax.head_best(w.weight, 256, n, activation="q8", knobs=knobs)
    best = run(head, *x, *w.planes, *found)
    (ids,) = run(argmax.best_of_blocks(blocks, n), *best, Out((rows,), "int32"))
    logits = values @ w.values.T
    same(ids, logits.argmax(1))
    of_blocks = np.full((rows, blocks * taken), -np.inf)
    of_blocks[:, :vocab] = logits
    of_blocks = of_blocks.reshape(rows, blocks, taken)
    close(best[0], of_blocks.max(2), 1e-6)
    same(best[1], of_blocks.argmax(2) + np.arange(blocks) * taken)
    got = product(linear([w.weight], 256, n, activation="q8"), [*x, *w.planes], rows, vocab)
    close(got, logits, 1e-6)
    np.testing.assert_array_equal(best[0].max(1), got.max(1))


@pytest.mark.parametrize("format", ["Q4_1", "Q6_K", "F16"])
def test_embedding(format: str) -> None:
    k = columns_of(format)
    w = matrix(format, 30, k)
    tokens = np.array([29, 0, 7, 7], np.int32)
    (y,) = run(embed(w.weight, k, None, 2.0), tokens, *w.planes, Out((4, k), "float32"))
    close(y, 2 * w.values[tokens], 1e-6)


def test_knobs_of_the_head_change_no_bit() -> None:
    w = matrix("Q4_0", 100, 160)
    x, _ = activation("q8", 1, 160)
    ids = []
    for knobs in (argmax.HeadKnobs(warps=8), argmax.HeadKnobs(warps=2, rows=4, passes=1)):
        blocks = argmax.head_blocks(100, knobs)
        kernels = (
            argmax.head_best(w.weight, 160, 1, activation="q8", knobs=knobs),
            argmax.best_of_blocks(blocks, 1),
        )
        built = build(*kernels)
        first, second = (built[k.attrs["global_symbol"]] for k in kernels)
        found = [Out((1, blocks), "float32"), Out((1, blocks), "int32")]
        ids.append(run(second, *run(first, *x, *w.planes, *found), Out((1,), "int32"))[0])
    np.testing.assert_array_equal(*ids)
