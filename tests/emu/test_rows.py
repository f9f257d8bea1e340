"""Norms, quantisation, argmax and what works element by element, on the emulated GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from activations import q8a, q8a_shapes
from emu.device import Out, run
from expectations import close, close_q8a, same

from xpuc.schedules.cuda import elementwise, read
from xpuc.schedules.cuda.argmax import argmax
from xpuc.schedules.cuda.norm import rms_norm
from xpuc.schedules.cuda.quantize import quantize

EPS = 1e-5


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("n", [1, None])
def test_quantisation_is_that_of_the_cpu_to_the_bit(n: int | None) -> None:
    x = random(n or 5, 160)
    x[-1, 32:64], x[0, 5], x[0, 96:112] = 0, 40, 1e-42
    got = run(quantize(160, n), x, *(Out(*shape) for shape in q8a_shapes(160, len(x))))
    for a, b in zip(got, q8a(x), strict=True):
        same(a, b)


def test_a_nan_is_in_the_scale_of_its_half_and_nowhere_else() -> None:
    x = random(1, 64)
    x[0, 20] = np.nan
    xq, xd, xs, xt = run(quantize(64, 1), x, *(Out(*shape) for shape in q8a_shapes(64, 1)))
    want = q8a(np.nan_to_num(x))
    for a in want[1][0, 0], want[2][0, 0]:
        a[1] = np.nan
    want[3][0, 0] = np.nan
    for a, b in zip((xd, xs, xt), want[1:], strict=True):
        same(a, b)
    same(xq[1], want[0][1])
    same(xq[0, :, :16], want[0][0, :, :16])


@pytest.mark.parametrize("d", [80, 576, 4096])
@pytest.mark.parametrize("step", ["plain", "residual", "post_norm"])
def test_rms_norm(d: int, step: str) -> None:
    x, delta = random(3, d), random(3, d) * 2
    w, post = random(d), random(d) + 1

    def normed(v: Any) -> Any:
        v = v.astype(np.float64)
        return v / np.sqrt((v * v).mean(1, keepdims=True) + EPS)

    added = {"plain": 0, "residual": delta, "post_norm": normed(delta) * post}[step]
    h = x + added
    inputs = {"plain": [x, w], "residual": [x, delta, w], "post_norm": [x, delta, post, w]}[step]
    residual = step != "plain"
    outputs = [Out((3, d), "float32")] * (1 + residual)
    kernel = rms_norm(d, None, EPS, residual=residual, post_norm=step == "post_norm")
    got = run(kernel, *inputs, *outputs)
    if residual:
        close(got[0], h, 1e-6)
    close(got[-1], normed(h) * w, 1e-6)
    if d % 32 == 0:
        kernel = rms_norm(
            d, None, EPS, residual=residual, post_norm=step == "post_norm", quantize=True
        )
        outputs[-1:] = [Out(*shape) for shape in q8a_shapes(d, 3)]
        rest, quantised = (out := run(kernel, *inputs, *outputs))[:-4], out[-4:]
        for a, b in zip(quantised, q8a(got[-1]), strict=True):
            np.testing.assert_array_equal(a, b)
        close_q8a(quantised, normed(h) * w)
        for a in rest:
            close(a, h, 1e-6)


def test_argmax_takes_the_first_of_equals_and_refuses_nan() -> None:
    logits = random(4, 1000)
    logits[0, [77, 900]] = 99
    logits[1, 5], logits[1, 3] = np.nan, np.inf
    logits[2] = -np.inf
    (ids,) = run(argmax(1000, None), logits, Out((4,), "int32"))
    same(ids, [77, -1, 0, logits[3].argmax()])


def test_elementwise() -> None:
    x, y = random(5, 130), random(5, 130) * 3
    rows = np.array([4, 0], np.int32)
    (out,) = run(elementwise.take_rows(130, None, 2), x, rows, Out((2, 130), "float32"))
    same(out, x[rows])
    (out,) = run(elementwise.residual_add(130, 5), x, y, Out((5, 130), "float32"))
    same(out, x + y)
    (out,) = run(elementwise.softcap(130, None, 30.0), y, Out((5, 130), "float32"))
    close(out, 30 * np.tanh(y / 30.0), 1e-6)
    (out,) = run(elementwise.zeros(130, None, "int32"), Out((5, 130), "int32"))
    same(out, 0)


def test_memory_read() -> None:
    w = np.random.default_rng(0).integers(-1000, 1000, (3, 8, 256, 4)).astype(np.int32)
    threads = read.sums(w.nbytes)
    (y,) = run(read.memory_read(w.nbytes), w.reshape(-1), Out((threads,), "int32"))
    same(y.reshape(3, 256), w.sum((1, 3)))


def test_rope_table() -> None:
    positions = np.array([0, 1, 99_999, 131_071], np.int32)
    frequencies = 10000.0 ** (-np.arange(0, 20, 2) / 20)
    (table,) = run(
        elementwise.rope_table(20, None, 1.25), positions, frequencies, Out((4, 20), "float32")
    )
    angle = positions[:, None] * frequencies
    want = np.concatenate([np.cos(angle), np.sin(angle)], 1) * 1.25
    close(table, want, 1.2e-7)
