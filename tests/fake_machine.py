"""A machine whose kernels take the time they are told, under a real tuning session.

What a session knows of boards, libraries and kernels is replaced at the edges; the search, the
comparisons, the log and the records are the real ones.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import sites
from tvm import tirx

from xpuc import tune_db
from xpuc.bench.roofs import Roofs
from xpuc.codegen.target import CompileTarget
from xpuc.schedules import RoofLoop, Schedule, Site, TargetFacts, kernel_digest, llvm
from xpuc.schedules.llvm import read
from xpuc.tuning import cases, session, workbench
from xpuc.tuning.candidates import Candidate, Program
from xpuc.tuning.inputs import Case
from xpuc.tuning.kernels import Board, BoardLost
from xpuc.tuning.results import Findings
from xpuc.tuning.roofs import Loop
from xpuc.tuning.session import Budget, Session
from xpuc.tuning.tasks import Subject, Task
from xpuc.tuning.trials import TrialLog
from xpuc.tuning.workbench import Job

Knobs = Mapping[str, int]
SPACE = {"near": (0, 1, 2), "wide": (0, 1)}


@dataclass(frozen=True)
class FakeKnobs:
    near: int = 0
    wide: int = 0


def schedule(sources: int = 0, space: Mapping[str, tuple[int, ...]] = SPACE) -> Schedule:
    """A schedule of kernels that differ in their knobs, and in the version of their `sources`."""

    def emit(emitter: Any, site: Site, knobs: FakeKnobs) -> Any:
        number = 100 * sources + 10 * knobs.near + knobs.wide
        kernel = tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int32", number)))
        named = kernel.with_attr("global_symbol", "kernel")
        return emitter.launch(named, site.operands, [site.result])

    return Schedule("fake", "linear", lambda _: True, emit, FakeKnobs, lambda _: space)


def task(size: int, uses: int = 1, rows: tuple[int, ...] = (1,), **changes: Any) -> Task:
    """A matrix of `size` rows; for any number of rows if it is measured with several."""
    site = sites.linear("n" if len(rows) > 1 else rows[0], [("Q8_0", size, 64)])
    return Task(site.facts(), sites.TARGET, schedule(**changes), {"decode_greedy": uses}, rows)


def job_of(task: Task) -> Job:
    """A task without its arrays."""
    made = tuple(cast(Case, SimpleNamespace(rows=rows)) for rows in task.rows)
    costs = tuple(cases.cost(task.site, r) for r in task.rows)
    return Job(task.name, task.site, made, costs, task.schedule.tolerance)


def use(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let sessions run on the machine."""
    monkeypatch.setattr(llvm, "SCHEDULES", (schedule(machine.sources),))
    monkeypatch.setattr(session, "build_loops", lambda target, folder: (Path("roofs"), ()))
    monkeypatch.setattr(session, "RoofKernels", FakeRoofKernels)
    monkeypatch.setattr(session, "job_of", job_of)
    monkeypatch.setattr(workbench, "Arguments", lambda board, case: case.rows)
    monkeypatch.setattr(workbench, "Kernel", machine.kernel)
    monkeypatch.setattr(workbench.reference, "error", lambda *_: machine.error)


@dataclass
class Machine:
    """`seconds(size, knobs, rows)` is what a call takes.

    Kernels for which `wrong` holds have other results, those for which `crashes` holds take their
    board along when they are loaded, the compiler does not build those for which `refused` holds.
    `slower` is what the machine takes longer by, asked anew in every turn of a kernel.
    """

    seconds: Callable[[int, Knobs, int], float]
    wrong: Callable[[Knobs], bool] = lambda knobs: False
    crashes: Callable[[Knobs], bool] = lambda knobs: False
    refused: Callable[[Knobs], bool] = lambda knobs: False
    slower: Callable[[], float] = lambda: 1.0
    error: float = 0.0
    sources: int = 0
    loaded: Counter[tuple[int, str]] = field(default_factory=Counter)  # by size and knobs

    def kernel(self, board: Any, module: Any, program: Program, rows: int) -> FakeKernel:
        return FakeKernel(self, *module, rows)


@dataclass
class FakeKernel:
    machine: Machine
    size: int
    knobs: Knobs
    rows: int

    def results(self) -> list[Any]:
        return [np.float32([self.size, self.rows, self.machine.wrong(self.knobs)])]

    def seconds(self, repeat: int) -> list[float]:
        taken = self.machine.seconds(self.size, self.knobs, self.rows)
        return [taken * self.machine.slower()] * repeat


class FakeRoofKernels:
    def __init__(self, board: Board, library: Path, loops: Sequence[Loop]) -> None:
        self.kernels = [SimpleNamespace(seconds=lambda repeat: [0.01] * repeat)]

    def roofs(self, times: Any) -> Roofs:
        return Roofs(20e9)


class FakeBuilder:
    """Writes what a candidate is in place of its library."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.folder = machine, folder

    def build(self, task: Task, knobs: Iterable[Knobs]) -> Iterator[Candidate]:
        for each in knobs:
            made = task.schedule.knobs_of(each)
            digest = kernel_digest(task.schedule, task.site, made)
            if self.machine.refused(each):
                yield Candidate(each, digest, refused="no registers left")
                continue
            library = self.folder / json.dumps([task.site.weights[0].rows, dict(each)])
            yield Candidate(each, digest, Program((), (), ()), library)


@dataclass
class FakeBoard:
    """A board that is gone after so many loads."""

    machine: Machine
    loads: int

    def load(self, library: Path) -> tuple[int, Knobs]:
        size, knobs = json.loads(library.name)
        self.loads -= 1
        if self.loads < 0 or self.machine.crashes(knobs):
            raise BoardLost("the connection broke")
        self.machine.loaded[size, json.dumps(knobs)] += 1
        return size, knobs


class FakeBoards:
    """Boards of which each connection lasts for so many loads; none is had after the last.

    Without `lasts`, there is always another, and it stays.
    """

    name = "fake boards"

    def __init__(self, machine: Machine, count: int = 1, lasts: Iterable[int] | None = None):
        self.machine, self.count = machine, count
        self._lasts = iter(lasts) if lasts is not None else None
        self._lock = threading.Lock()
        self.connections = 0

    def connect(self) -> Board:
        with self._lock:
            loads = next(self._lasts, None) if self._lasts is not None else 10**9
            if loads is None:
                raise BoardLost("no board")
            self.connections += 1
        return cast(Board, FakeBoard(self.machine, loads))

    def close(self) -> None:
        pass


def subject(*tasks: Task) -> Subject:
    target = SimpleNamespace(facts=sites.TARGET)
    return Subject(Path("tiny.gguf"), cast(CompileTarget, target), tasks, {"decode_greedy": 1})


BEST = {"near": 2, "wide": 1}


def faster(size: int, knobs: Knobs, rows: int) -> float:
    """Bigger knobs gain a tenth and a fifth."""
    return 1e-5 * size * rows / (1 + 0.1 * knobs["near"]) / (1 + 0.2 * knobs["wide"])


def level(size: int, knobs: Knobs, rows: int) -> float:
    return 1e-5 * size * rows


class Tuner:
    """Sessions that share a log and a folder of records."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.log = TrialLog(folder / "trials" / "llvm.jsonl")

    def session(self, machine: Machine, *tasks: Task, **options: Any) -> Session:
        use(self.monkeypatch, machine)
        given = {"budget": Budget(), "boards": FakeBoards(machine), "resumes": False} | options
        return Session(
            subject=subject(*tasks), builder=FakeBuilder(machine, self.folder),
            db=tune_db.load("llvm", "x86-64-v3", self.folder), folder=self.folder, log=self.log,
            threads=2, **given,
        )  # fmt: skip

    def run(self, machine: Machine, *tasks: Task, **options: Any) -> Findings:
        return self.session(machine, *tasks, **options).run()

    def records(self) -> dict[str, dict[str, int]]:
        """Knobs by shape, as they are on the disk."""
        db = tune_db.load("llvm", "x86-64-v3", self.folder)
        return {record.key.shape: record.knobs for record in db.records.values()}

    def outcomes(self) -> list[str]:
        return [trial.outcome for trial in self.log.read()]

    def trials(self) -> list[tuple[str, str]]:
        """Task and knobs of every trial, in order."""
        return [
            (t.task, json.dumps(t.knobs, sort_keys=True))
            for t in self.log.read()
            if not t.concludes
        ]


def small_roofs(facts: TargetFacts) -> list[RoofLoop]:
    """For llvm.roof_loops: a loop that takes no time."""
    n_bytes, parts = 1 << 20, 256
    kernel = read.memory_read(n_bytes, parts)
    return [RoofLoop(read.NAME, kernel, n_bytes // 4, (parts * read.LANES,), {"bytes": n_bytes})]
