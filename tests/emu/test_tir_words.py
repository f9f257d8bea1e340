"""The kernels of gpu_kernels.py, which use every word of schedules/cuda/tir.py, against numpy."""

from __future__ import annotations

import numpy as np
from emu.device import Out, run
from gpu_kernels import contraction, q4_0_mat_vec, rms_norm, tile_product

RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def test_rms_norm():
    x, w = normal(3, 2048), normal(2048)
    (y,) = run(rms_norm(2048), x, w, Out((3, 2048), "float32"))
    mean = (x.astype(np.float64) ** 2).mean(1, keepdims=True)
    np.testing.assert_allclose(y, x / np.sqrt(mean + 1e-5) * w, rtol=1e-5)


def test_q4_0_mat_vec():
    rows, columns = 8, 1056  # 33 blocks: a second turn for the first lane
    blocks = columns // 32
    d = (0.1 * normal(rows, blocks)).astype(np.float16)
    nibbles = RNG.integers(0, 16, (rows, blocks, 32)).astype(np.uint8)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    w = np.concatenate([d[..., None].view(np.uint8), packed], axis=2).reshape(rows, -1)
    xq = RNG.integers(-127, 128, (blocks, 32)).astype(np.int8)
    scale = np.abs(normal(blocks)) / 127
    x_sum = scale * xq.sum(1, dtype=np.int32).astype(np.float32)
    given = w.view(np.uint16), xq.reshape(-1).view(np.uint32), scale, x_sum
    (y,) = run(q4_0_mat_vec(rows, columns), *given, Out((rows,), "float32"))
    weights = d[..., None].astype(np.float64) * (nibbles.astype(np.float64) - 8)
    expected = (weights * (scale[:, None] * xq)).sum((1, 2))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_tile_product():
    k = 48
    a, b = ((0.3 * normal(n, k)).astype(np.float16) for n in (16, 8))
    out = Out((16, 8), "float32"), Out((16, 8), "int32"), Out((32, 8), "float16")
    c, s, rounded = run(tile_product(k), a, b, *out)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    lane = np.arange(32)
    for i in range(4):
        at = (lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2)
        mine = product[at]
        expected = np.exp2(mine) / mine[lane // 2] + mine[lane ^ 1]
        np.testing.assert_allclose(c[at], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(rounded[:, [i, i + 4]], mine[:, None].repeat(2, 1), rtol=2e-3)
        whole = bytes_product(a, b)[at] + np.rint(mine).astype(np.int64)
        np.testing.assert_array_equal(s[at], whole)


def bytes_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What mma.s8 makes of tiles loaded for mma.f16: the 2 bytes of an element are neighbours."""
    return a.view(np.int8).astype(np.int64) @ b.view(np.int8).astype(np.int64).T


def test_contraction():
    a, b, c = (normal(256) for _ in range(3))
    exact = a.astype(np.float64) * b + c
    for fused in (True, False):
        (y,) = run(contraction(fused), a, b, c, Out((256,), "float32"))
        total = exact.astype(np.float32) if fused else a * b + c
        np.testing.assert_array_equal(y, total / c)
    assert (exact.astype(np.float32) != a * b + c).any()
