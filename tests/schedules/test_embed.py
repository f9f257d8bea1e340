"""Rows gathered from packed weights against gguf's decoding."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import build, call
from packed_weights import columns_for, packed, relative_error

from xpuc.schedules.llvm.embed import embed
from xpuc.schedules.packed import FORMATS


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_every_format(format: str) -> None:
    k = columns_for(format)
    w = packed(format, 21, k)
    tokens = np.array([20, 0, 7, 8, 15, 20], np.int32)
    (y,) = call(build(embed(w.weight, k, None, 1.0)), [tokens, *w.planes], [((6, k), "float32")])
    assert relative_error(y, w.values[tokens]) < 1e-6


def test_one_scaled_row() -> None:
    w = packed("Q8_0", 16, 64)
    tokens = np.array([9], np.int32)
    (y,) = call(build(embed(w.weight, 64, 1, 2.5)), [tokens, *w.planes], [((1, 64), "float32")])
    assert relative_error(y, 2.5 * w.values[[9]]) < 1e-6
