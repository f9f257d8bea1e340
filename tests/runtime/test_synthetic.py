"""Planes made up from a seed."""

from __future__ import annotations

import numpy as np

from xpuc.artifact import Plane, Synthetic
from xpuc.runtime.synthetic import made_up_planes

SIZE = 200_001  # no whole number of words
RANGES = {
    "qs": ("uint32", None),
    "scales": ("uint8", (0.0, 63.0)),
    "signed": ("int8", (-32.0, 31.0)),
    "bytes": ("int8", (-128.0, 127.0)),
    "words": ("uint16", (6.0, 65530.0)),
    "d": ("float16", (-(2.0**-13), 1.5 * 2.0**-13)),
    "norm": ("float32", (0.875, 1.125)),
}
PLANES = tuple(Plane(name, dtype, SIZE) for name, (dtype, _) in RANGES.items())


def made(seed: int) -> list[np.ndarray]:
    spans = tuple(span for _, span in RANGES.values())
    return list(made_up_planes(PLANES, Synthetic(seed, spans)))


def test_elements_are_all_over_their_ranges() -> None:
    for plane, array, (_, span) in zip(PLANES, made(1), RANGES.values(), strict=True):
        assert (array.dtype, array.shape) == (plane.dtype, (SIZE,))
        assert array.ctypes.data % 64 == 0
        info = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
        low, high = span or (info.min, info.max)
        values = array.astype(np.float64)
        assert low <= values.min() < low + (high - low) * 1e-3
        assert high - (high - low) * 1e-3 < values.max() <= high
        counts, _ = np.histogram(values, 4, (low, high))
        assert abs(counts / SIZE - 0.25).max() < 0.01


def test_a_seed_gives_the_same_planes_and_another_one_others() -> None:
    first, again, other = made(1), made(1), made(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert a.tobytes() == b.tobytes()
        assert np.mean(a == c) < 0.05
