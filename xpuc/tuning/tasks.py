"""What there is to tune: the operations of a model, or of an artifact by its manifest."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from xpuc.artifact import read_manifest
from xpuc.codegen import target
from xpuc.codegen.compile import Options, operations
from xpuc.errors import RequestError
from xpuc.schedules import Choice, Schedule, Site, TargetFacts, pick, site_of, target_of
from xpuc.tune_db import Key, TuneDb

# What a kernel for any number of rows is measured with: those of a chunk, or of its logits.
_CHUNK_ROWS, _LOGITS_ROWS = (16, 128, 512), (1, 8, 64)


@dataclass(frozen=True)
class Task:
    """An operation with knobs; `uses` counts it in each entry point.

    `rows` are the numbers of rows it is measured with: its own, or several if it takes any.
    """

    facts: Mapping[str, Any]
    target: TargetFacts
    schedule: Schedule
    uses: Mapping[str, int]
    rows: tuple[int, ...]

    @cached_property
    def site(self) -> Site:
        """The operation's place, with variables of its own."""
        return site_of(dict(self.facts), self.target, target_of(self.target.kind).planes)

    @property
    def key(self) -> Key:
        return self.site.key

    @property
    def name(self) -> str:
        """As the manifest names it: `linear Q4_1:576x576 rows=1`."""
        return f"{self.key.op} {self.key.shape} rows={self.key.rows or 'any'}"

    def in_use(self, db: TuneDb) -> Choice:
        """What a compilation with these records takes."""
        choice = pick(self.site, target_of(self.target.kind).SCHEDULES, db, deterministic=False)
        assert choice is not None
        return choice


def task_of(facts: Mapping[str, Any], schedule: str, kind: str, cpu: str) -> Task:
    """The task of a site, for a process that is to build it: it is measured elsewhere."""
    found = _schedule({"schedule": schedule, "op": facts["op"]}, target_of(kind).SCHEDULES)
    assert found is not None, f"no schedule {schedule}"
    return Task(facts, target.resolve(kind, cpu).facts, found, {}, ())


@dataclass(frozen=True)
class Subject:
    """What a session tunes: the tasks of a model or an artifact, on a target."""

    path: Path
    target: target.CompileTarget
    tasks: tuple[Task, ...]
    entry_rows: Mapping[str, int]  # rows a call of each entry point has; 0: any number

    @property
    def is_artifact(self) -> bool:
        return self.path.is_dir()


def subject(path: Path, kernel: str | None = None, options: Options | None = None) -> Subject:
    """The tasks of a checkpoint or an artifact whose names match the pattern `kernel`.

    RequestError if there is none to tune.
    """
    options = options or Options()
    if path.is_dir():
        manifest = read_manifest(path)
        machine = target.resolve(manifest.target["kind"], manifest.target["cpu"])
        found = manifest.operations
        chunk = manifest.max_chunk
        entries = {e.name: e.rows for e in manifest.entry_points}
    else:
        machine = target.resolve(options.target, options.cpu)
        found, entries = operations(path, options)
        chunk = options.max_chunk
    tasks = tuple(_tasks(found, machine.facts, chunk))
    chosen = tuple(t for t in tasks if kernel is None or fnmatch.fnmatch(t.name, kernel))
    if not tasks:
        raise RequestError(
            f"{path}: no operation has knobs to tune", "xpuc compile takes it as it is"
        )
    if not chosen:
        names = ", ".join(sorted({t.key.op for t in tasks}))
        raise RequestError(
            f"--kernel {kernel}: no operation of {path} with knobs is called so",
            f"they are named like 'linear Q4_1:576x576 rows=1'; operations with knobs: {names}",
        )
    return Subject(path, machine, chosen, entries)


def _tasks(
    found: Iterable[Mapping[str, Any]], facts: TargetFacts, max_chunk: int
) -> Iterable[Task]:
    """One task a key: sites that differ in what the kernels do not see are tuned as one."""
    tasks: dict[tuple[Key, str], Task] = {}
    for operation in found:
        schedule = _schedule(operation, target_of(facts.kind).SCHEDULES)
        if schedule is None:
            continue
        rows = _rows(operation, max_chunk)
        task = Task(operation, facts, schedule, operation["uses"], rows)
        if schedule.space(task.site):
            at = (task.key, schedule.name)
            uses = Counter(task.uses) + Counter(tasks[at].uses if at in tasks else {})
            tasks[at] = replace(tasks.get(at, task), uses=uses)
    return tasks.values()


def _rows(operation: Mapping[str, Any], max_chunk: int) -> tuple[int, ...]:
    own = operation["rows"]
    if own:
        return (int(own),)
    many = _LOGITS_ROWS if "m" in operation["result"] else _CHUNK_ROWS
    return tuple(sorted({min(rows, max_chunk) for rows in many}))


def _schedule(operation: Mapping[str, Any], schedules: Sequence[Schedule]) -> Schedule | None:
    for schedule in schedules:
        if (schedule.name, schedule.op) == (operation["schedule"], operation["op"]):
            return schedule
    return None
