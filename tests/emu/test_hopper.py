"""Tiles and warpgroup products as kernels write them, against numpy, rows and columns left over."""

from __future__ import annotations

import numpy as np
import pytest
from emu.device import Out, run
from gpu_kernels import hopper_product

RNG = np.random.default_rng(11)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 8, 64), (150, 64, 208), (130, 128, 64)])
def test_floats(m: int, n: int, k: int) -> None:
    a, b = (RNG.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    (c,) = run(hopper_product(n, k, "float16"), a, b, Out((m, n), "float32"))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 8, 128), (70, 32, 400)])
def test_bytes(m: int, n: int, k: int) -> None:
    a, b = (RNG.integers(-128, 128, (rows, k), dtype=np.int8) for rows in (m, n))
    (c,) = run(hopper_product(n, k, "int8"), a, b, Out((m, n), "uint32"))
    np.testing.assert_array_equal(c.view(np.int32), a.astype(np.int32) @ b.astype(np.int32).T)
