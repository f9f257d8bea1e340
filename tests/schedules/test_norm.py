"""The block boundary and the activation quantiser against numpy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_ops
from activations import q8a, q8a_shapes
from kernel_calls import build, call

from xpuc.schedules.llvm.norm import residual_add, rms_norm
from xpuc.schedules.llvm.quantize import quantize

EPS = 1e-5


def rms(x: Any) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS)


def rows(n: int, d: int) -> Any:
    x = np.random.default_rng(n * d).standard_normal((n, d), np.float32)
    x[:, :: d // 7] *= 30
    return x


@pytest.mark.parametrize(
    ("n", "static"), [(1, True), (3, True), (40, True), (1, False), (37, False)]
)
def test_quantize_is_exactly_the_written_rule(n: int, static: bool) -> None:
    k = 320
    x = rows(n, k)
    x[0, 32:64] = 0
    x[n - 1, 64:96] = 1e-43
    x[0, 96:128] = np.arange(32) * 4 + 2.5  # the scale is 1: halves must go to even
    x[0, 127] = 127
    for got, want in zip(
        call(build(quantize(k, n if static else None)), [x], q8a_shapes(k, n)), q8a(x), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_keeps_a_bad_value_visible_in_the_scale(bad: float) -> None:
    x = rows(1, 64)
    x[0, 40] = bad
    _, xd, _, _ = call(build(quantize(64, 1)), [x], q8a_shapes(64, 1))
    assert np.isfinite(xd[0, 0]).all()
    assert list(np.isfinite(xd[1, 0])) == [False, True]


@pytest.mark.parametrize(("residual", "post_norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("n", "static", "d"), [(1, True, 576), (2, True, 96), (33, False, 640)])
def test_rms_norm_of_every_boundary(
    residual: bool, post_norm: bool, n: int, static: bool, d: int
) -> None:
    x, delta, rng = rows(n, d), rows(n, d)[:, ::-1].copy(), np.random.default_rng(5)
    w, w_post = rng.standard_normal((2, d), np.float32)
    inputs = [x, *([delta] if residual else []), *([w_post] if post_norm else []), w]
    h = x.astype(np.float64)
    if residual:
        h = h + (rms(delta) * w_post if post_norm else delta)
    size = n if static else None
    shapes = [((n, d), "float32")] * (2 if residual else 1)
    plain = rms_norm(d, size, EPS, residual=residual, post_norm=post_norm)
    *got_h, y = call(build(plain), inputs, shapes)
    np.testing.assert_allclose(y, rms(h) * w, rtol=2e-6, atol=1e-6)
    for got in got_h:
        np.testing.assert_allclose(got, h, rtol=2e-6, atol=1e-5)

    fused = rms_norm(d, size, EPS, residual=residual, post_norm=post_norm, quantize=True)
    outputs = call(build(fused), inputs, shapes[1:] + q8a_shapes(d, n))
    for got, want in zip(outputs, got_h + q8a(y), strict=True):
        np.testing.assert_array_equal(got, want)


SCALES = "0.3651 2.0000 0.7071 0.2000 0.3333"
ROWS = """\
  0.3651  0.7303  1.0954  1.4606
  1.0000  1.0000  1.0000  1.0000
 -1.4142  0.0000  1.4142  0.0000
  2.0000  0.0000  0.0000  0.0000
  1.0000  1.0000  1.0000  1.0000"""


def test_scales_golden() -> None:
    """What the example RmsNormThreads of "Reading inference engine codebases" prints."""
    x = np.array(
        [[1, 2, 3, 4], [0.5, 0.5, 0.5, 0.5], [-2, 0, 2, 0], [10, 0, 0, 0], [3, 3, 3, 3]], np.float32
    )
    # Each row twice over, which leaves its mean of squares: the kernel wants whole vectors.
    twice, weight = np.tile(x, 2), np.ones(8, np.float32)
    plain = rms_norm(8, None, EPS, residual=False, post_norm=False)
    (y,) = call(build(plain), [twice, weight], [((5, 8), "float32")])
    np.testing.assert_array_equal(y[:, 4:], y[:, :4])
    for got in (y[:, :4], reference_ops.rms_norm(x, weight[:4], EPS)):
        assert "\n".join("".join(f"{v:8.4f}" for v in row) for row in got) == ROWS
        assert " ".join(f"{scale:.4f}" for scale in got[:, 0] / x[:, 0]) == SCALES


@pytest.mark.parametrize("post_norm", [False, True])
def test_residual_add_equals_the_stream_of_the_norm_bit_for_bit(post_norm: bool) -> None:
    n, d = 5, 320
    x, delta = rows(n, d), rows(n, d)[:, ::-1].copy()
    w, w_post = np.random.default_rng(6).standard_normal((2, d), np.float32)
    inputs = [x, delta, *([w_post] if post_norm else [])]
    shape = ((n, d), "float32")
    (alone,) = call(build(residual_add(d, None, EPS, post_norm=post_norm)), inputs, [shape])
    norm = rms_norm(d, None, EPS, residual=True, post_norm=post_norm)
    h, _ = call(build(norm), [*inputs, w], [shape, shape])
    np.testing.assert_array_equal(alone, h)
    assert not np.array_equal(alone, x)


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_row_has_the_same_bits_in_every_call(post_norm: bool) -> None:
    d, n = 576, 33
    x, delta = rows(n, d), rows(n, d)[:, ::-1].copy()
    w, w_post = np.random.default_rng(7).standard_normal((2, d), np.float32)
    tail = [*([w_post] if post_norm else []), w]

    def run(static: int | None, first: int, last: int) -> list[Any]:
        func = rms_norm(d, static, EPS, residual=True, post_norm=post_norm, quantize=True)
        m = last - first
        shapes = [((m, d), "float32"), *q8a_shapes(d, m)]
        return call(build(func), [x[first:last], delta[first:last], *tail], shapes)

    whole = run(None, 0, n)
    for got, want in zip(run(1, 8, 9), whole, strict=True):
        np.testing.assert_array_equal(got, want[8:9] if want.shape[0] == n else want[:, 8:9])
    for got, want in zip(run(4, 8, 12), whole, strict=True):
        np.testing.assert_array_equal(got, want[8:12] if want.shape[0] == n else want[:, 8:12])
