"""The oracle's operations, each against a second way of computing the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_ops as ops

RNG = np.random.default_rng(3)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def attention_by_hand(q, k, v, scale, window, cap):
    """One position and one head at a time, in float64."""
    n, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    out = np.zeros((n, heads, v.shape[2]))
    for i in range(n):
        here = total - n + i
        first = max(0, here - window + 1) if window else 0
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = [
                scale * float(q[i, head].astype(np.float64) @ k[j, shared].astype(np.float64))
                for j in range(first, here + 1)
            ]
            if cap:
                scores = [cap * math.tanh(score / cap) for score in scores]
            powers = np.exp(np.array(scores) - max(scores))
            out[i, head] = powers / powers.sum() @ v[first : here + 1, shared]
    return out


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("rows", [3, 256])
def test_attention(window, cap, rows, monkeypatch):
    monkeypatch.setattr(ops, "ATTENTION_ROWS", rows)
    q, k, v = draw(11, 6, 8), draw(17, 2, 8), draw(17, 2, 4)
    found = ops.attention(q, k, v, scale=0.4, window=window, cap=cap)
    np.testing.assert_allclose(found, attention_by_hand(q, k, v, 0.4, window, cap), atol=1e-5)


@pytest.mark.parametrize("neox", [False, True])
def test_rotation_turns_pairs_as_complex_numbers(neox):
    rope = ops.Rope(dims=6, base=100.0, neox=neox)
    x, positions = draw(5, 2, 8), np.array([0, 1, 2, 7, 300])
    found = ops.rotate(x, positions, rope)
    first, second = ([0, 1, 2], [3, 4, 5]) if neox else ([0, 2, 4], [1, 3, 5])
    turn = np.exp(1j * positions[:, None, None] * 100.0 ** (-np.array([0, 2, 4]) / 6))
    turned = (x[..., first] + 1j * x[..., second]) * turn
    np.testing.assert_allclose(found[..., first], turned.real, atol=1e-5)
    np.testing.assert_allclose(found[..., second], turned.imag, atol=1e-5)
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])


def test_scores_depend_on_the_distance_alone():
    rope = ops.Rope(dims=8, base=10000.0, neox=True)
    q, k = draw(1, 1, 8), draw(1, 1, 8)

    def score(at: int, before: int) -> float:
        there = ops.rotate(k, np.array([at - before]), rope)
        return float((ops.rotate(q, np.array([at]), rope) * there).sum())

    assert score(5, 3) == pytest.approx(score(2005, 3), abs=1e-5)


def test_linear_scaling_stretches_positions():
    plain = ops.Rope(dims=8, base=10000.0, neox=True)
    stretched = ops.Rope(dims=8, base=10000.0, neox=True, scale=0.25)
    x = draw(1, 1, 8)
    found = ops.rotate(x, np.array([12]), stretched)
    np.testing.assert_allclose(found, ops.rotate(x, np.array([3]), plain), atol=1e-6)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones():
    plain = ops.Rope(dims=64, base=10000.0, neox=True)
    yarn = ops.Rope(dims=64, base=10000.0, neox=True, scale=0.125, yarn=1.0, original=4096)
    ratio = ops.rope_frequencies(yarn) / ops.rope_frequencies(plain)
    turns = 4096 * ops.rope_frequencies(plain) / (2 * math.pi)
    # Limits fall on whole pairs: rounded away from the middle, so a pair's room on each side.
    assert (ratio[turns > 32 * 1.5] == 1.0).all()
    np.testing.assert_allclose(ratio[turns < 1 / 1.5], 0.125)
    assert (np.diff(ratio) <= 0).all()
    assert ops.rope_magnitude(yarn) == pytest.approx(0.1 * math.log(8.0) + 1.0)


def test_yarn_of_factor_one_is_no_scaling():
    plain = ops.Rope(dims=64, base=10000.0, neox=True)
    yarn = ops.Rope(dims=64, base=10000.0, neox=True, yarn=1.0, original=4096)
    np.testing.assert_allclose(ops.rope_frequencies(yarn), ops.rope_frequencies(plain))
    assert ops.rope_magnitude(yarn) == 1.0


def test_frequency_factors_divide():
    rope = ops.Rope(dims=4, base=10000.0, neox=False)
    factors = np.array([1.0, 8.0], np.float32)
    np.testing.assert_allclose(ops.rope_frequencies(rope, factors), [1.0, 0.01 / 8])


def test_rms_norm_has_unit_mean_square():
    x = 1e3 * draw(4, 64)
    found = ops.rms_norm(x, np.ones(64, np.float32), 1e-6)
    np.testing.assert_allclose((found.astype(np.float64) ** 2).mean(-1), 1.0, rtol=1e-5)
    tiny = ops.rms_norm(np.zeros((1, 64), np.float32), np.ones(64, np.float32), 1e-6)
    assert (tiny == 0.0).all()


def test_activations_against_their_definitions():
    x = np.linspace(-30, 30, 1001, dtype=np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(ops.silu(x), wide / (1 + np.exp(-wide)), atol=1e-6)
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in wide])
    np.testing.assert_allclose(ops.gelu_tanh(x), exact, atol=1e-3)
    assert ops.gelu_tanh(np.float32([1.0]))[0] == pytest.approx(0.8411919906)


def test_softcap():
    x = np.float32([-1e9, 0.5, 1e9])
    np.testing.assert_allclose(ops.softcap(x, 30.0), [-30.0, 30 * math.tanh(0.5 / 30), 30.0])
    assert ops.softcap(x, 0.0) is x
