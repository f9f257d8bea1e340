"""How far a kernel's result is from what it should be: one measure, for tests and on a GPU box."""

from __future__ import annotations

from hashlib import sha256

import numpy as np


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference: of floats in terms of the largest magnitude of `want`, of integers
    as it is. Infinite where only one of the two is NaN."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    there = ~np.isnan(b)
    if not np.array_equal(np.isnan(a), ~there):
        return float("inf")
    if not there.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        off = float(np.nan_to_num(np.abs(a - b)[there], nan=0.0, posinf=np.inf).max())
    largest = float(np.abs(b[there & np.isfinite(b)]).max(initial=0.0))
    return off if got.dtype.kind != "f" or not largest else off / largest


def digest(array: np.ndarray) -> str:
    """Of its bits; all NaNs are one."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return sha256(array.tobytes()).hexdigest()
