"""Kernels timed in turns, so that what disturbs the machine disturbs them alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_BLOCK_S = 0.03  # of one kernel in one turn, at least one run
_MOST_RUNS = 200
_LONGEST_S, _FEWEST = 2.0, 3  # of one kernel in all turns, unless it needs more for so many
_NOISE = 0.005  # what a kernel must be faster by, besides being so in three of four turns
DRIFT = 0.10  # a change of the incumbent's time that makes a measurement worthless


class Timed(Protocol):
    """Something that runs on a board."""

    def seconds(self, repeat: int) -> list[float]:
        """Seconds of each of `repeat` runs."""


@dataclass(frozen=True)
class Times:
    """Seconds of each turn of one kernel."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def spread(self) -> float:
        """The distance of the quartiles over the median."""
        low, _, high = statistics.quantiles(self.turns, n=4, method="inclusive")
        return (high - low) / self.median


def in_turns(kernels: Sequence[Timed], turns: int) -> list[Times]:
    """Time kernels in turns, each time another one first; a turn's time is a median of its runs.

    Kernels that take long get fewer turns than asked for.
    """
    once = [min(kernel.seconds(3)) for kernel in kernels]  # the first run wakes the threads
    repeat = [max(1, min(_MOST_RUNS, int(_BLOCK_S / seconds))) for seconds in once]
    slowest = max(seconds * n for seconds, n in zip(once, repeat, strict=True))
    turns = min(turns, max(_FEWEST, int(_LONGEST_S / slowest)))
    taken: list[list[float]] = [[] for _ in kernels]
    for turn in range(turns):
        for i in range(len(kernels)):
            at = (turn + i) % len(kernels)
            taken[at].append(statistics.median(kernels[at].seconds(repeat[at])))
    return [Times(tuple(t)) for t in taken]


def is_faster(kernel: Times, other: Times) -> bool:
    """Whether it is, beyond the noise: by half a percent in three turns of four."""
    ratios = [a / b for a, b in zip(kernel.turns, other.turns, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")[2] < 1 - _NOISE


def has_drifted(now: Times, before: float) -> bool:
    """Whether a kernel takes another time than it did."""
    return abs(now.median / before - 1) > DRIFT
