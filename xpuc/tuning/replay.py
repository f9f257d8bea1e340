"""A bundle's candidates checked and timed on the GPU of this machine, which needs no compiler.

They run in a process of their own: a kernel that breaks takes the GPU's context along, and one that
does not end is never over, so that process is ended and another goes on after it. What is measured
is in the results before the next thing is; those who stop it lose at most the candidate it is at.
(On a GPU elsewhere: remote.py.)
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xpuc import interrupts
from xpuc.errors import ArtifactError, FileError, RequestError, XpucError
from xpuc.tuning import bundle
from xpuc.tuning.box import Box, Card, check
from xpuc.tuning.bundle import Blocks, BundledTask, BundleManifest
from xpuc.tuning.candidates import Candidate
from xpuc.tuning.kernels import Board, BoardLost
from xpuc.tuning.roofs import RoofKernels
from xpuc.tuning.trials import CRASHED, KEPT, LOST, MEASURED, NOTHING, WRONG, Trial, TrialLog
from xpuc.tuning.workbench import Workbench

RESULTS_VERSION = 2
STATUS, AT = "status", "at"  # what is told: how far it is, what is run next
_AGAIN = 3  # how a process ends whose GPU context is broken
_PATIENCE_S = 120  # without a word of it; a candidate takes seconds
_LEAVING_S = 5


@dataclass(frozen=True)
class Header:
    """The first line of results: what was measured, and on what.

    `tasks` has the facts of each one's site and its schedule, by name.
    """

    bundle: str  # its digest
    arch: str
    tvm: str
    xpuc: str
    card: str
    driver: str
    date: str
    tasks: dict[str, dict[str, Any]]


def read_header(results: Path) -> Header:
    """That of a file of results; FileError if it is none."""
    if not results.is_file():
        raise FileError(f"{results}: not found", "give the results of xpuc tune --replay")
    try:
        with results.open(encoding="utf-8") as file:
            raw = json.loads(file.readline())
        version = raw.pop("results")
        header = Header(**raw)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FileError(
            f"{results}: no results of xpuc tune --replay", "give the file that it has written"
        ) from None
    if version != RESULTS_VERSION:
        raise ArtifactError(
            f"{results}: results of format {version}, this xpuc reads {RESULTS_VERSION}",
            "replay the bundle with this version of xpuc",
        )
    return header


@dataclass
class Replay:
    """A bundle unpacked in `folder`, and the results it is measured into.

    `watch(task, done, total, trials)` is told what it is at.
    """

    folder: Path
    manifest: BundleManifest
    results: Path
    watch: Callable[[str, int, int, int], None] = lambda task, done, total, trials: None
    at: dict[str, Any] | None = field(init=False, default=None)  # the trial that is under way

    def check(self, what: Path) -> Card:
        """The card that the bundle, `what`, can be measured on; XpucError if there is none."""
        return check(self.manifest, what)

    def start(self, card: Card, digest: str, *, resumes: bool) -> None:
        """Open the results of a bundle on a card; RequestError if they are of another."""
        if resumes:
            header = read_header(self.results)
            if (header.bundle, header.card) != (digest, card.name):
                raise RequestError(
                    f"--resume: {self.results} is of another bundle or card",
                    "leave --resume out, or name another file with --results",
                )
            return
        made = Header(
            digest, self.manifest.arch, self.manifest.tvm, self.manifest.xpuc, card.name,
            card.driver, date.today().isoformat(),
            {t.name: {"schedule": t.schedule, "facts": dict(t.facts)} for t in self.manifest.tasks},
        )  # fmt: skip
        self.results.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"results": RESULTS_VERSION, **asdict(made)})
        self.results.write_text(text + "\n", encoding="utf-8")

    def run(self, seconds: float) -> str:
        """Measure until all is done or the time is up; why it ended: done, budget or stopped."""
        deadline = time.monotonic() + seconds
        while True:
            self.at = None
            ended = self.play(deadline)
            if ended is not None:
                return ended

    def play(self, deadline: float) -> str | None:
        """Why it ended; None if it broke at a candidate, which is in the results as that."""
        context = multiprocessing.get_context("spawn")
        own, others = context.Pipe()
        left = deadline - time.monotonic()
        process = context.Process(target=_work, args=(self.folder, self.results, left, others))

        def stop() -> None:
            with suppress(OSError):
                own.send("stop")

        with interrupts.told(stop):
            with interrupts.held_back():
                process.start()
            others.close()
            ended = self._follow(own)
            if ended is None:
                process.join(_LEAVING_S)
                process.kill()
            process.join()
        if ended is None:
            if self.at is None:
                raise XpucError(
                    f"the process that measures ended by itself (exit code {process.exitcode})",
                    "see whether nvidia-smi shows the GPU in order, then go on with --resume",
                )
            TrialLog(self.results).append(Trial(**self.at | {"outcome": CRASHED}))
        return ended

    def heed(self, told: tuple[str, Any]) -> None:
        """What a Play tells."""
        kind, what = told
        if kind == STATUS:
            self.watch(*what)
        else:
            self.at = what

    def _follow(self, own: Connection) -> str | None:
        """Why the process ended; None if it did without a word, or says none any more."""
        while True:
            try:
                if not own.poll(_PATIENCE_S):
                    return None
                kind, told = own.recv()
            except (EOFError, OSError):
                return None
            if kind == "error":
                raise XpucError(*told)
            if kind == "ended":
                return str(told)
            self.heed((kind, told))


def _work(folder: Path, results: Path, seconds: float, parent: Connection) -> None:
    """In a process of its own, whose parent tells it of Ctrl-C."""
    stop = time.monotonic() + seconds
    try:
        manifest = bundle.read(folder)
        board = Box(folder)
        roofs = RoofKernels(board, folder / bundle.ROOFS, manifest.loops)
        board.flush = roofs.kernels[0].run
        stopped = False

        def is_spent() -> bool:
            nonlocal stopped
            while parent.poll():
                stopped |= parent.recv() == "stop"
            return stopped or time.monotonic() >= stop

        play = Play(board, roofs, folder, manifest, TrialLog(results), parent.send, is_spent)
        is_done = play.all()
        parent.send(("ended", "done" if is_done else "stopped" if stopped else "budget"))
    except BoardLost as reason:
        parent.close()
        raise SystemExit(_AGAIN) from reason
    except XpucError as error:
        parent.send(("error", (error.message, error.hint)))


class Play:
    """The tasks of a bundle on a board, in its order; what results have of them stands."""

    def __init__(
        self, board: Board, roofs: RoofKernels, folder: Path, manifest: BundleManifest,
        log: TrialLog, tell: Callable[[tuple[str, Any]], None], is_spent: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._board, self._roofs, self._folder, self._manifest = board, roofs, folder, manifest
        self._log, self._tell_of, self._is_spent = log, tell, is_spent
        self._start = time.monotonic()
        self._blocks = Blocks(folder)
        self._known: dict[str, dict[str, Trial]] = {}
        self._concluded: set[str] = set()
        for trial in log.read():
            self._known.setdefault(trial.task, {})[trial.kernel] = trial
            if trial.concludes:
                self._concluded.add(trial.task)

    def all(self) -> bool:
        """Whether it came to the end of them."""
        tasks = self._manifest.tasks
        for i, task in enumerate(tasks):
            self._tell_of((STATUS, (task.name, i, len(tasks), self._n_trials)))
            known = self._known.setdefault(task.name, {})
            in_use = known.get(task.candidates[0].kernel)
            is_broken = in_use is not None and in_use.outcome in (CRASHED, WRONG)
            if task.name in self._concluded or is_broken:
                continue
            if self._is_spent() or not self._task(task, known):
                return False
        return True

    @property
    def _n_trials(self) -> int:
        return sum(map(len, self._known.values()))

    def _task(self, task: BundledTask, known: dict[str, Trial]) -> bool:
        """Whether all of it was measured, or nothing of it can be."""
        in_use, *others = task.candidates
        library = self._folder / task.library
        self._at(task, in_use)
        job = bundle.job_of(task, self._blocks, self._manifest.segment_tokens)
        try:
            bench = Workbench(self._board, job, in_use.at(library), self._roofs)
        except XpucError as error:  # what is in use is wrong here
            self._log.append(_trial(task, in_use, WRONG, detail=error.message))
            return True
        for candidate in others:
            if self._is_spent():
                return False
            if candidate.kernel not in known or known[candidate.kernel].outcome == LOST:
                self._try(task, bench, candidate.at(library))
        best = max(others, key=lambda c: self._counts(known, c), default=in_use)
        if self._counts(known, best) <= 1.0:
            self._tell(task, bench, in_use, NOTHING, bench.baseline)
            return True
        defaults = next((c for c in task.candidates if c.is_default), in_use)
        self._at(task, best)
        beside, plain = bench.confirm(best.at(library), defaults.at(library))
        if beside.is_faster and beside.is_right:
            self._tell(task, bench, best, KEPT, beside.measured, beside_defaults=plain.measured)
        else:
            self._tell(task, bench, in_use, NOTHING, bench.baseline, "the best was not confirmed")
        return True

    def _counts(self, known: dict[str, Trial], candidate: Candidate) -> float:
        trial = known.get(candidate.kernel)
        return trial.counts if trial is not None and trial.outcome == MEASURED else 0.0

    def _try(self, task: BundledTask, bench: Workbench, candidate: Candidate) -> None:
        self._at(task, candidate)
        compared = bench.compare(candidate)
        outcome = MEASURED if compared.is_right else WRONG
        trial = self._tell(
            task, bench, candidate, outcome, compared.measured, is_faster=compared.is_faster
        )
        self._known[task.name][candidate.kernel] = trial

    def _at(self, task: BundledTask, candidate: Candidate) -> None:
        """Tell what is run next: if it breaks, it was that."""
        self._tell_of((AT, asdict(_trial(task, candidate, CRASHED))))

    def _tell(
        self, task: BundledTask, bench: Workbench, candidate: Candidate, outcome: str,
        measured: Any, detail: str = "", **more: Any,
    ) -> Trial:  # fmt: skip
        trial = _trial(
            task, candidate, outcome, measured=tuple(measured), error=bench.error,
            seconds=round(time.monotonic() - self._start, 2), detail=detail, **more,
        )  # fmt: skip
        self._log.append(trial)
        return trial


def _trial(task: BundledTask, candidate: Candidate, outcome: str, **more: Any) -> Trial:
    knobs = dict(candidate.knobs)
    return Trial(task.name, task.schedule, knobs, candidate.kernel, outcome, **more)
