"""Where the time of a step goes: its kernels, what they cost at least, and the rest.

A clock around each call of a running step would be Python's, twice as long as the step, and would
empty the caches between two kernels. So the calls of one step are recorded, and then made again
one after the other: the same kernels on the same operands in the same order, without the VM. That
takes as long as the step within a few percent; what is left of the step's median, mostly the VM and
below zero if the noise is larger, is the row `between kernels`. On a GPU the launches of a kernel
are a CUDA graph, timed by the GPU's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from xpuc.artifact import Manifest, Tail
from xpuc.bench.launches import Transparent, launches
from xpuc.bench.roofs import Roofs
from xpuc.runtime.batch import Batch, StepModel

REST = "between kernels"
_ROUND_S, _MOST = 0.05, 8  # short steps are repeated within a round


@dataclass(frozen=True)
class KernelRow:
    """All launches of a kernel in one step. The last row of a step is what is left of it."""

    kernel: str
    launches: int
    us: float  # median over the repetitions
    pct_step: float
    n_bytes: int  # of weights and K/V
    operations: int  # on int8
    limited_by: str | None
    limit_us: float
    pct_limit: float | None


@dataclass(frozen=True)
class Profile:
    """One step, and the rows that add up to it, longest first."""

    step: str
    step_us: float
    rows: tuple[KernelRow, ...]


class Profiler:
    """A step to be run, and its launches to be repeated."""

    def __init__(
        self, model: StepModel, manifest: Manifest, batch: Batch, *, tail: Tail = "greedy"
    ) -> None:
        self._model, self._batch, self._tail = model, batch, tail
        self.launches = launches(cast("Transparent", model), manifest, batch, tail=tail)
        self._replay = cast("Transparent", model).replayer(
            [(each.kernel, partial(each.function, *each.arguments)) for each in self.launches]
        )
        self._steps: list[float] = []
        self._replays: list[dict[str, float]] = []  # seconds of all launches of a kernel

    def round(self) -> None:
        """A few steps, each beside a repetition of its launches."""
        first = self._step()  # wakes the threads
        n = max(1, min(_MOST, int(_ROUND_S / first)))
        for _ in range(n):
            self._steps.append(self._step())
            self._replays.append(self._replay())

    def profile(self, roofs: Roofs) -> Profile:
        """The medians of all rounds."""
        step = statistics.median(self._steps)
        places: dict[str, list[int]] = {}
        for place, launch in enumerate(self.launches):
            places.setdefault(launch.kernel, []).append(place)
        rows = sorted(
            (self._row(each, step, roofs) for each in places.values()),
            key=lambda row: row.us,
            reverse=True,
        )
        rest = 1e6 * step - sum(row.us for row in rows)
        left = KernelRow(REST, 0, rest, rest / step / 1e4, 0, 0, None, 0.0, None)
        return Profile(_name(self._batch), 1e6 * step, (*rows, left))

    def _row(self, places: Sequence[int], step: float, roofs: Roofs) -> KernelRow:
        """Of one kernel, which is launched at these places of the step."""
        of_kernel = [self.launches[place] for place in places]
        seconds = statistics.median(each[of_kernel[0].kernel] for each in self._replays)
        n_bytes = sum(launch.n_bytes for launch in of_kernel)
        operations = sum(launch.operations for launch in of_kernel)
        limit, limited_by = roofs.limit(n_bytes, operations)
        return KernelRow(
            kernel=of_kernel[0].kernel, launches=len(places), us=1e6 * seconds,
            pct_step=100 * seconds / step, n_bytes=n_bytes, operations=operations,
            limited_by=limited_by, limit_us=1e6 * limit,
            pct_limit=100 * limit / seconds if limited_by else None,
        )  # fmt: skip

    def _step(self) -> float:
        start = time.perf_counter()
        self._model.run(self._batch, tail=self._tail)
        return time.perf_counter() - start


def _name(batch: Batch) -> str:
    """Such as `8 rows up to position 1024`."""
    rows = int(batch.tiles[:, 1].sum())
    return f"{rows} row{'s' * (rows != 1)} up to position {batch.positions.max()}"
