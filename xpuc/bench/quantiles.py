"""What is said of many times: how long the usual one is, and how long the worst ones are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantiles:
    """Of `n` values, in their unit; between two of them linear, as numpy.quantile has it."""

    n: int
    p50: float
    p90: float
    p99: float
    max: float


def quantiles(values: Iterable[float]) -> Quantiles:
    """All are 0 if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (_quantile(ordered, q) for q in (0.5, 0.9, 0.99))
    return Quantiles(len(ordered), p50, p90, p99, ordered[-1])


def _quantile(ordered: list[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
