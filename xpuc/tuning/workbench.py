"""One board and the task on it: candidates are checked, then timed beside the incumbent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpuc.bench.roofs import Roofs
from xpuc.errors import XpucError
from xpuc.tune_db import Measurement
from xpuc.tuning import reference
from xpuc.tuning.candidates import Candidate
from xpuc.tuning.inputs import Case, Site
from xpuc.tuning.kernels import Arguments, Board, Kernel
from xpuc.tuning.results import Cost
from xpuc.tuning.roofs import RoofKernels
from xpuc.tuning.timing import Times, has_drifted, in_turns, is_faster

_TURNS, _LAST_TURNS = 7, 21  # to try a candidate; to confirm the best
_RETRIES = 3


@dataclass(frozen=True)
class Job:
    """A task as it is put on a workbench: its arrays and costs, one for each number of rows.

    `tolerance` is that of its schedule.
    """

    name: str
    site: Site
    cases: tuple[Case, ...]
    costs: tuple[Cost, ...]
    tolerance: float


@dataclass(frozen=True)
class Compared:
    """A candidate beside the incumbent: a measurement for each number of rows."""

    measured: tuple[Measurement, ...]
    is_faster: bool  # beyond the noise, with every number of rows
    is_right: bool  # the incumbent's result to the bit
    discarded: int = 0  # measurements thrown away because the machine had changed


class Workbench:
    """A task on a board. The first candidate put on it is the incumbent."""

    def __init__(self, board: Board, job: Job, incumbent: Candidate, roofs: RoofKernels) -> None:
        self.board, self.job, self.incumbent, self._roof_kernels = board, job, incumbent, roofs
        self._arguments = [Arguments(board, case) for case in job.cases]
        self._incumbent = self._kernels(incumbent)
        self._results = [kernel.results() for kernel in self._incumbent]
        self.error = max(
            reference.error(job.site, case, got)
            for case, got in zip(job.cases, self._results, strict=True)
        )
        if self.error > job.tolerance:
            raise XpucError(
                f"{job.name}: differs from the reference by {self.error:.1e}",
                "this kernel is wrong on this board: please report it with this line",
            )
        times, self.roofs = self._timed(self._incumbent, _TURNS)
        self._before = [t.median for t in times]
        self.baseline = tuple(self._measurement(i, t, t, self.roofs) for i, t in enumerate(times))

    def compare(self, candidate: Candidate) -> Compared:
        """Check a candidate and time it beside the incumbent."""
        kernels = self._kernels(candidate)
        if not self._agree(kernels):
            return Compared((), is_faster=False, is_right=False)
        measured: list[Measurement] = []
        faster, discarded = True, 0
        for i, kernel in enumerate(kernels):
            for left in reversed(range(_RETRIES)):
                incumbent, times = in_turns([self._incumbent[i], kernel], _TURNS)
                if not has_drifted(incumbent, self._before[i]):
                    break
                if left:
                    discarded += 1
                else:  # it is another machine by now
                    self._before[i] = incumbent.median
            faster = faster and is_faster(times, incumbent)
            measured.append(self._measurement(i, times, incumbent, self.roofs))
        return Compared(tuple(measured), faster, is_right=True, discarded=discarded)

    def confirm(self, candidate: Candidate, default: Candidate) -> tuple[Compared, Compared]:
        """The best candidate timed longer: beside the incumbent, and beside the defaults."""
        kernels, defaults = self._kernels(candidate), self._kernels(default)
        sides: tuple[list[Measurement], list[Measurement]] = ([], [])
        right, faster = self._agree(kernels), [True, True]
        for i, kernel in enumerate(kernels):
            timed, roofs = self._timed([kernel, self._incumbent[i], defaults[i]], _LAST_TURNS)
            for side, other in enumerate(timed[1:]):
                faster[side] = faster[side] and is_faster(timed[0], other)
                sides[side].append(self._measurement(i, timed[0], other, roofs))
        incumbent, plain = (
            Compared(tuple(m), f, is_right=right) for m, f in zip(sides, faster, strict=True)
        )
        return incumbent, plain

    def _timed(self, kernels: Sequence[Kernel], turns: int) -> tuple[list[Times], Roofs]:
        """Kernels in turns with those of the roofs."""
        times = in_turns([*kernels, *self._roof_kernels.kernels], turns)
        return times[: len(kernels)], self._roof_kernels.roofs(times[len(kernels) :])

    def _kernels(self, candidate: Candidate) -> list[Kernel]:
        assert candidate.library is not None
        assert candidate.program is not None
        module = self.board.load(candidate.library)
        program = candidate.program
        return [Kernel(self.board, module, program, own) for own in self._arguments]

    def _agree(self, kernels: Sequence[Kernel]) -> bool:
        return all(
            _same(kernel.results(), want)
            for kernel, want in zip(kernels, self._results, strict=True)
        )

    def _measurement(self, i: int, times: Times, default: Times, roofs: Roofs) -> Measurement:
        cost = self.job.costs[i]
        seconds, roof = roofs.limit(cost.n_bytes, cost.operations)
        assert roof is not None, f"{self.job.name} needs nothing"
        return Measurement(
            rows=self.job.cases[i].rows, us=round(times.median * 1e6, 2),
            spread=round(times.spread, 4), default_us=round(default.median * 1e6, 2),
            roof=roof, of_roof=round(seconds / times.median, 3),
        )  # fmt: skip


def _same(results: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]]) -> bool:
    """Equal to the bit; a NaN equals itself."""
    return all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8))
        for a, b in zip(results, wanted, strict=True)
    )
