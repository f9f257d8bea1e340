"""Tiles and warpgroup products as kernels write them, against numpy, rows left over."""

from __future__ import annotations

import numpy as np
import pytest
from emu.device import Out, run
from gpu_kernels import hopper_product

RNG = np.random.default_rng(11)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 8, 64), (150, 64, 256), (130, 128, 192)])
def test_a_product_of_tiles(m: int, n: int, k: int) -> None:
    a, b = (RNG.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    (c,) = run(hopper_product(n, k), a, b, Out((m, n), "float32"))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)
