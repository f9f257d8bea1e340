"""Quantised activations (q8a) in numpy, as docs/formats.md defines them: the oracle of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK, HALF = 32, 16


def q8a(x: Any) -> list[Any]:
    """f32 (n, k) to xq int8 (b, n, 32), xd and xs f32 (b, n, 2), xt f32 (b, n), with b = k / 32."""
    n, k = x.shape
    halves = x.reshape(n, k // BLOCK, 2, HALF).transpose(1, 0, 2, 3)
    scale = np.abs(halves).max(3) / np.float32(127)
    with np.errstate(all="ignore"):
        inverse = np.where(scale >= np.finfo(np.float32).tiny, np.float32(1) / scale, np.float32(0))
        quants = np.rint(halves * inverse[..., None]).astype(np.int8)
    counts = quants.sum(3, dtype=np.int32).astype(np.float32)
    sums = scale * counts
    fused = (
        scale[..., 1].astype(np.float64) * counts[..., 1] + sums[..., 0]
    )  # exact before rounding
    return [quants.reshape(k // BLOCK, n, BLOCK), scale, sums, fused.astype(np.float32)]


def q8a_shapes(k: int, n: int) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the four tensors."""
    b = k // BLOCK
    f32 = "float32"
    return [((b, n, BLOCK), "int8"), ((b, n, 2), f32), ((b, n, 2), f32), ((b, n), f32)]


def values_of(quantised: list[Any]) -> Any:
    """What the integers stand for, f64 (n, k)."""
    quants, scale = quantised[0], quantised[1]
    b, n, _ = quants.shape
    halves = quants.reshape(b, n, 2, HALF) * scale[..., None].astype(np.float64)
    return halves.transpose(1, 0, 2, 3).reshape(n, b * BLOCK)
