"""Results of kernels against numpy's. Who observes is told what a result is held to, as
device/recorder.py is, which has a GPU held to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from activations import q8a
from device.difference import difference

observers: list[Callable[[np.ndarray, np.ndarray, float], object]] = []


def close(got: np.ndarray, want: Any, tolerance: float) -> None:
    """Assert that a result, or a view of a part of it, is within `tolerance` of `want`.

    That is relative to the largest of `want` for floats, absolute for integers. `want` may have
    fewer axes; where it is NaN the result has to be.
    """
    want = np.broadcast_to(np.asarray(want), got.shape)
    for observer in observers:
        observer(got, want, tolerance)
    off = difference(got, want)
    assert off <= tolerance, f"off by {off:.3g}, by more than {tolerance:.3g}"


def same(got: np.ndarray, want: Any) -> None:
    """Assert that a result, or a view of a part of it, is `want`; NaN where it is NaN."""
    close(got, want, 0)


def close_q8a(got: Sequence[np.ndarray], want: np.ndarray) -> None:
    """Assert that `got` are the tensors of the q8a of numbers that are nearly `want` (n, k).

    Nearly: a code may be a step off, and so the sums of codes.
    """
    tolerances = (1, 1e-5, 1e-2, 1e-2)
    for a, b, tolerance in zip(got, q8a(want.astype(np.float32)), tolerances, strict=True):
        close(a, b, tolerance)
