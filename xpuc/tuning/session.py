"""A session: what matters most is tuned first, until nothing helps or the budget is spent.

Two passes over the tasks, each shared out among the boards: the incumbents' times, from which
follows how much of a step each task is; then the search. Everything measured is in the log before
the next thing is, and a record is written as soon as it is confirmed: a session that is stopped
has lost at most the trial it was at.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from xpuc import interrupts, tune_db
from xpuc.artifact import CPU_FEATURES
from xpuc.bench.roofs import Roofs, combined
from xpuc.errors import XpucError
from xpuc.schedules import Choice, other_kernel, tvm_version
from xpuc.tune_db import Measurement, Record, TuneDb
from xpuc.tuning.boards import Boards
from xpuc.tuning.candidates import Candidate
from xpuc.tuning.cases import job_of
from xpuc.tuning.kernels import Board, BoardLost
from xpuc.tuning.programs import Builder, build_loops
from xpuc.tuning.results import Findings, TaskResult
from xpuc.tuning.roofs import Loop, RoofKernels
from xpuc.tuning.search import Search
from xpuc.tuning.shares import saved, share_out
from xpuc.tuning.tasks import Subject, Task
from xpuc.tuning.trials import CRASHED, KEPT, MEASURED, NOTHING, REFUSED, WRONG, Trial, TrialLog
from xpuc.tuning.workbench import Workbench

_MEASURING = 0.5  # of the seconds at most, for the incumbents' times; the rest is for the search
# Of a board: at one candidate, which has then crashed it; at one task with nothing measured in
# between, beyond which the task is left alone.
_LOSSES = 2

_Loops = tuple[Path, Sequence[Loop]]  # a library of them


@dataclass(frozen=True)
class Budget:
    """When to stop: after so many seconds or trials of this session, whichever comes first."""

    seconds: float | None = None
    trials: int | None = None


@dataclass(frozen=True)
class Status:
    """What a session is at, for those who watch. `done` and `total` count tasks of this pass."""

    doing: str  # measuring | tuning
    task: str
    done: int
    total: int
    trials: int
    best: float  # gain of the best candidate of the task so far
    saved: float  # part of the tuned kernels' time that records have saved so far, weighted by use


@dataclass
class Session:
    """One run of `xpuc tune`.

    `db` holds the records in use before, `folder` is where new ones go. `watch` is called from the
    threads of the boards, one at a time.
    """

    subject: Subject
    boards: Boards
    builder: Builder
    db: TuneDb
    folder: Path
    log: TrialLog
    budget: Budget
    threads: int
    watch: Callable[[Status], None] = lambda status: None
    resumes: bool = False
    results: dict[str, TaskResult] = field(init=False)  # by the name of the task

    def __post_init__(self) -> None:
        self._start = self._resumed = time.monotonic()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the queue, or who is at work
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._losses: Counter[str] = Counter()
        self._queue: list[Task] = []
        self._roofs: list[Roofs] = []
        self._trials = self._done = self._total = self._discarded = self._busy = 0
        self._lacked_boards = False
        self._doing = ""
        self.results = {t.name: TaskResult(t) for t in self.subject.tasks}
        if self.resumes:
            self._take_up()
        else:
            self.log.start(self.folder)

    def run(self) -> Findings:
        """Tune. A stop (see `stop`) ends it early with what is done."""
        loops = build_loops(self.subject.target, self.builder.folder)
        self._pass("measuring", list(self.subject.tasks), loops, self._measure)
        share_out(self.results.values())
        ranked = sorted(self.results.values(), key=lambda r: r.share, reverse=True)
        left = [r.task for r in ranked if not any(t.concludes for t in r.trials) and r.baseline]
        self._pass("tuning", left, loops, self._tune)
        return self._findings(ranked)

    def stop(self) -> None:
        """Ask the session to end after the measurement it is at."""
        self._stopped.set()

    @property
    def seconds(self) -> float:
        """Since the start, of all its parts if it was resumed."""
        return time.monotonic() - self._start

    @property
    def _is_spent(self) -> bool:
        budget, own = self.budget, time.monotonic() - self._resumed
        part = _MEASURING if self._doing == "measuring" else 1.0
        return (
            self._stopped.is_set()
            or (budget.seconds is not None and own >= part * budget.seconds)
            or (budget.trials is not None and self._trials >= budget.trials)
        )

    def _take_up(self) -> None:
        """The trials of the session before, but for those of kernels that have changed since."""
        for trial in self.log.read():
            self._start = time.monotonic() - trial.seconds  # its clock goes on
            result = self.results.get(trial.task)
            if result is None or result.task.schedule.name != trial.schedule:
                continue
            schedule = result.task.schedule
            if other_kernel(schedule, result.task.site, trial.knobs, trial.kernel) is None:
                result.trials.append(trial)
                if trial.outcome == KEPT:
                    result.record = self.db.lookup(result.task.key, schedule.name)
                if trial.concludes:
                    result.reason = trial.outcome

    # --- a pass over tasks, on every board ---

    def _pass(
        self, doing: str, tasks: Sequence[Task], loops: _Loops, step: Callable[[_Place, Task], None]
    ) -> None:
        self._queue, self._done, self._doing, self._total = list(tasks), 0, doing, len(tasks)
        work = [
            threading.Thread(target=self._work, args=(loops, step, i))
            for i in range(min(self.boards.count, len(tasks)))
        ]
        with interrupts.told(self.stop):  # an interrupted join would take a thread for ended
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
        self._lacked_boards |= bool(self._queue) and not self._is_spent
        if self._failure is not None:
            raise self._failure

    def _work(self, loops: _Loops, step: Callable[[_Place, Task], None], i: int) -> None:
        """A board's thread: tasks from the queue until all are done, or there is no board."""
        place: _Place | None = None
        while (task := self._next()) is not None:
            try:
                if place is None:
                    board = self.boards.connect()
                    kernels = RoofKernels(board, *loops)
                    place = _Place(board, kernels, f"{self.boards.name} #{i + 1}")
                self._tell(task)
                step(place, task)
            except BoardLost as reason:
                self._give_back(task, str(reason), was_at_it=place is not None)
                if place is None:
                    return  # no board to be had: others may go on
                place = None
            except XpucError as error:
                self.results[task.name].reason = error.message
                if place is None:  # this machine cannot measure at all
                    self._failure = error
                    self.stop()
            except Exception as error:  # a full disk, or a fault of ours: it ends the session
                self._failure = error
                self.stop()
            else:
                with self._lock:
                    self._done += 1
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _next(self) -> Task | None:
        """The next task. While others are at theirs, one may come back: their board may go away."""
        with self._changed:
            while not self._queue and self._busy and not self._is_spent:
                self._changed.wait(0.2)  # seconds run out without a word
            if not self._queue or self._is_spent:
                return None
            self._busy += 1
            return self._queue.pop(0)

    def _give_back(self, task: Task, reason: str, *, was_at_it: bool) -> None:
        """A board went away under a task: it is for another, unless it happens again and again."""
        with self._lock:
            self._losses[task.name] += was_at_it
            if self._losses[task.name] <= _LOSSES:
                self._queue.insert(0, task)
            else:
                self.results[task.name].reason = f"lost a board {_LOSSES + 1} times ({reason})"

    def _tell(self, task: Task, best: float = 1.0) -> None:
        with self._lock:
            status = Status(
                self._doing, task.name, self._done, self._total, self._trials, best,
                saved(self.results.values()),
            )  # fmt: skip
            self.watch(status)

    # --- what is done with a task ---

    def _measure(self, place: _Place, task: Task) -> None:
        result = self.results[task.name]
        bench = self._bench(place, task)
        result.baseline, result.costs = bench.baseline, bench.job.costs
        if result.kept is not None:  # what was in use before this session was resumed
            result.baseline = tuple(m.beside for m in result.kept.measured)
        self._roofs.append(bench.roofs)

    def _bench(self, place: _Place, task: Task) -> Workbench:
        incumbent = self._built(task, self._incumbent(task))
        return Workbench(place.board, job_of(task), incumbent, place.roofs)

    def _choice(self, task: Task) -> Choice:
        """What a compilation would take today."""
        with self._lock:
            return task.in_use(self.db)

    def _incumbent(self, task: Task) -> dict[str, int]:
        """The knobs in use."""
        return dict(dataclasses.asdict(self._choice(task).knobs))

    def _built(self, task: Task, knobs: dict[str, int]) -> Candidate:
        (candidate,) = self.builder.build(task, [knobs])
        if candidate.refused:
            raise XpucError(
                f"{task.name}: its kernel does not build ({candidate.refused})",
                "xpuc doctor says what the compiler needs",
            )
        return candidate

    def _tune(self, place: _Place, task: Task) -> None:
        result = self.results[task.name]
        incumbent = self._incumbent(task)
        bench = self._bench(place, task)
        search = Search(task.schedule.space(task.site), incumbent)
        for trial in result.trials:
            search.tell(trial.knobs, trial.counts)
        seen = {trial.kernel: trial.counts for trial in result.trials}
        for batch in search.batches():
            for candidate in self.builder.build(task, batch):
                if self._is_spent:
                    # What was found so far is kept; a stop by the user is not kept waiting.
                    if search.gain > 1.0 and not self._stopped.is_set():
                        self._conclude(place, bench, result, search)
                    return
                gain = seen.get(candidate.kernel)
                if gain is None:
                    gain = seen[candidate.kernel] = self._try(place, bench, result, candidate)
                search.tell(candidate.knobs, gain)
                self._tell(task, search.gain)
        self._conclude(place, bench, result, search)

    def _try(
        self, place: _Place, bench: Workbench, result: TaskResult, candidate: Candidate
    ) -> float:
        """Measure a candidate, log it; its gain if it may count."""
        if candidate.refused:
            self._log(place, result, candidate, REFUSED, detail=candidate.refused)
            return 0.0
        crash = f"{result.task.name} {candidate.kernel}"
        if self._losses[crash] >= _LOSSES:
            self._log(place, result, candidate, CRASHED)
            return 0.0
        try:
            compared = bench.compare(candidate)
        except BoardLost:
            self._losses[crash] += 1
            raise
        self._discarded += compared.discarded
        outcome = MEASURED if compared.is_right else WRONG
        return self._log(
            place, result, candidate, outcome, compared.measured, bench.error,
            is_faster=compared.is_faster,
        ).counts  # fmt: skip

    def _conclude(
        self, place: _Place, bench: Workbench, result: TaskResult, search: Search
    ) -> None:
        """Confirm the best candidate, and record it if it holds.

        If nothing is faster, that is recorded as well, where no record says more: then the knobs
        in use were measured, and their times are known.
        """
        task, knobs = result.task, dict(search.best)
        best = self._built(task, knobs)
        detail, measured = "", tuple[Measurement, ...]()
        if search.gain > 1.0:
            plain = self._built(task, dict(dataclasses.asdict(task.schedule.knobs())))
            confirmed, beside_defaults = bench.confirm(best, plain)
            measured = confirmed.measured
            if confirmed.is_faster and confirmed.is_right:
                result.record = self._record(task, bench, best, beside_defaults.measured)
                result.reason = KEPT
                self._log(place, result, best, KEPT, measured, bench.error)
                return
            detail = "the best was not confirmed"
        if self._choice(task).record is None:
            self._record(task, bench, bench.incumbent, bench.baseline)
        result.reason = f"{NOTHING}: {detail}" if detail else NOTHING
        self._log(place, result, best, NOTHING, measured, detail=detail)

    def _record(
        self, task: Task, bench: Workbench, candidate: Candidate, measured: tuple[Measurement, ...]
    ) -> Record:
        """Write a record of a candidate; it is in use from now on."""
        error = float(f"{bench.error:.1e}")
        features = tuple(sorted(task.target.features & set(CPU_FEATURES)))
        record = Record(
            key=task.key, schedule=task.schedule.name, knobs=dict(candidate.knobs),
            kernel=candidate.kernel, tvm=tvm_version(), features=features, threads=self.threads,
            measured=measured, error=error, date=date.today().isoformat(),
        )  # fmt: skip
        with self._lock:
            tune_db.save(self.folder, self.subject.target.facts.kind, [record])
            self.db.add(record)
        return record

    def _log(
        self, place: _Place, result: TaskResult, candidate: Candidate, outcome: str,
        measured: tuple[Measurement, ...] = (), error: float = 0.0, detail: str = "",
        is_faster: bool = False,
    ) -> Trial:  # fmt: skip
        trial = Trial(
            result.task.name, result.task.schedule.name, dict(candidate.knobs), candidate.kernel,
            outcome, measured, error, place.name, round(self.seconds, 2), detail, is_faster,
        )  # fmt: skip
        with self._lock:
            self.log.append(trial)
            result.trials.append(trial)
            self._losses[trial.task] = 0
            self._trials += not trial.concludes
        return trial

    # --- what it comes to ---

    def _findings(self, ranked: list[TaskResult]) -> Findings:
        facts = self.subject.target.facts
        notes: dict[str, Any] = {}
        if self._stopped.is_set():
            notes["stopped"] = "stopped before the end: --resume goes on"
        elif self._lacked_boards:
            notes["boards"] = "no board was left: --resume goes on when there is one"
        elif self._is_spent:
            notes["budget"] = "the budget was spent: --resume goes on"
        return Findings(
            subject=str(self.subject.path), target=facts.cpu, boards=(self.boards.name,),
            threads=self.threads, seconds=self.seconds,
            roofs=combined(self._roofs, statistics.median) if self._roofs else Roofs(math.nan),
            results=ranked, speeds=[],
            retried=self._discarded, records_path=str(self.folder / f"{facts.kind}.jsonl"),
            notes=notes,
        )  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """A board with the kernels of its roofs, and what the log calls it."""

    board: Board
    roofs: RoofKernels
    name: str
