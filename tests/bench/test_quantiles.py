"""Quantiles are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpuc.bench.quantiles import Quantiles, quantiles


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300))
def test_quantiles_are_those_of_numpy(values: list[float]) -> None:
    found = quantiles(iter(values))
    expected = [*np.quantile(values, [0.5, 0.9, 0.99]), max(values)]
    assert [found.p50, found.p90, found.p99, found.max] == pytest.approx(expected, rel=1e-9)
    assert found.n == len(values)


def test_nothing_has_quantiles_of_nothing() -> None:
    assert quantiles([]) == Quantiles(0, 0, 0, 0, 0)
