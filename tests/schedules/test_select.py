"""Rows, caps and argmax of logits against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import build, call

from xpuc.schedules.llvm.select import argmax, scale, softcap, take_rows


@pytest.mark.parametrize("v", [5, 8, 1000, 49_152, 32_003])
@pytest.mark.parametrize(("m", "static"), [(1, True), (3, True), (9, False)])
def test_argmax(v: int, m: int, static: bool) -> None:
    kernel = build(argmax(v, m if static else None))
    rng = np.random.default_rng(v + m)
    shape = [((m,), "int32")]
    for _ in range(5):
        logits = rng.standard_normal((m, v), np.float32)
        np.testing.assert_array_equal(call(kernel, [logits], shape)[0], logits.argmax(1))
        ties = np.rint(logits)  # many equal maxima: the first wins
        np.testing.assert_array_equal(call(kernel, [ties], shape)[0], ties.argmax(1))
    for place in {0, v - 1, v // 2, v // 3}:
        logits[m - 1] = -1e30
        logits[m - 1, place] = 1e30
        assert call(kernel, [logits], shape)[0][m - 1] == place
        logits[m - 1, place] = np.nan
        got = call(kernel, [logits], shape)[0]
        assert got[m - 1] == -1
        np.testing.assert_array_equal(got[:-1], logits[:-1].argmax(1))


@pytest.mark.parametrize("v", [16, 40_000])
def test_argmax_of_infinities(v: int) -> None:
    kernel = build(argmax(v, 1))
    logits = np.full((1, v), -np.inf, np.float32)
    assert call(kernel, [logits], [((1,), "int32")])[0] == 0
    logits[0, v - 3 :] = np.inf
    assert call(kernel, [logits], [((1,), "int32")])[0] == v - 3


@pytest.mark.parametrize("d", [64, 30])
@pytest.mark.parametrize(("n", "m"), [(7, 1), (7, 3), (None, 12), (None, None)])
def test_take_rows(d: int, n: int | None, m: int | None) -> None:
    x = np.random.default_rng(d).standard_normal((7, d), np.float32)
    rows = np.array([6, 0, 3, 3, 2, 1, 4, 5, 6, 6, 0, 0], np.int32)[: m or 12]
    (got,) = call(build(take_rows(d, n, m)), [x, rows], [((len(rows), d), "float32")])
    np.testing.assert_array_equal(got, x[rows])


@pytest.mark.parametrize("d", [40, 33, 32_768])
@pytest.mark.parametrize(("m", "static"), [(1, True), (5, False)])
def test_softcap_and_scale(d: int, m: int, static: bool) -> None:
    x = np.random.default_rng(d).standard_normal((m, d), np.float32) * 40
    size = m if static else None
    (got,) = call(build(softcap(d, size, 30.0)), [x], [(x.shape, "float32")])
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6)
    (got,) = call(build(scale(d, size, 0.3)), [x], [(x.shape, "float32")])
    np.testing.assert_array_equal(got, x * np.float32(0.3))
