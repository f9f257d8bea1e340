"""What a session found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xpuc.bench.roofs import Roofs
from xpuc.tune_db import Measurement, Record
from xpuc.tuning.trials import KEPT, Trial

if TYPE_CHECKING:
    from xpuc.tuning.tasks import Task


@dataclass(frozen=True)
class Cost:
    """What a call of a task needs with `rows` rows, at least."""

    rows: int
    n_bytes: int
    operations: int


@dataclass
class TaskResult:
    """A task's trials and the record they ended in, if one did.

    `baseline` are the incumbent's times, one row for each number of rows; `share` is its part of
    the step it matters most in (0 to 1); `reason` says why there is no new record.
    """

    task: Task
    baseline: tuple[Measurement, ...] = ()
    costs: tuple[Cost, ...] = ()
    share: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    record: Record | None = None
    reason: str = "not reached"

    @property
    def kept(self) -> Trial | None:
        """The trial that the new record is of: its times are beside those of the incumbent."""
        return next((t for t in reversed(self.trials) if t.outcome == KEPT), None)


@dataclass(frozen=True)
class Speed:
    """Tokens a second of an entry point's step before and after, and how the latter is known."""

    test: str  # tg128, pp512, ...
    before: float
    after: float
    measured: bool  # False: predicted from the kernels


@dataclass
class Findings:
    """The whole session."""

    subject: str
    target: str  # LLVM's CPU name
    boards: tuple[str, ...]
    threads: int
    seconds: float
    roofs: Roofs
    results: list[TaskResult]
    speeds: list[Speed]
    retried: int  # measurements discarded because the machine drifted
    records_path: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
