"""How much of a step each task is, and how much of it the records save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from xpuc.tune_db import Measurement
from xpuc.tuning.results import TaskResult


def share_out(results: Collection[TaskResult]) -> None:
    """Fill in each task's part of the step in which it matters most, among the tasks."""
    totals: Counter[str] = Counter()
    for result in results:
        for entry, uses in result.task.uses.items():
            totals[entry] += round(uses * _us(result.baseline) * 1e3)
    for result in results:
        parts = [
            uses * _us(result.baseline) * 1e3 / totals[entry]
            for entry, uses in result.task.uses.items()
            if totals[entry]
        ]
        result.share = max(parts, default=0.0)


def saved(results: Collection[TaskResult]) -> float:
    """The part of the tasks' time, by their uses, that the records of this session save."""
    less = total = 0.0
    for result in results:
        uses, before = max(result.task.uses.values(), default=0), _us(result.baseline)
        total += uses * before
        if result.kept is not None:
            last = result.kept.measured[-1]
            less += uses * max(0.0, before - last.us / last.default_us * before)
    return less / total if total else 0.0


def _us(measured: Sequence[Measurement]) -> float:
    """Microseconds of a call, with the most rows it was measured with."""
    return measured[-1].us if measured else 0.0
