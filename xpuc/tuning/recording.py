"""Results of a replayed bundle as records: what is faster, of kernels that are still the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpuc import tune_db
from xpuc.codegen.target import resolve
from xpuc.errors import ArtifactError
from xpuc.schedules import Schedule, Site, other_kernel, site_of, target_of, tvm_version
from xpuc.tune_db import Record
from xpuc.tuning.replay import Header, read_header
from xpuc.tuning.trials import KEPT, Trial, TrialLog


@dataclass
class Imported:
    """Records made of results, and why there is none of other tasks, counted by reason."""

    header: Header
    records: list[Record] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    path: Path | None = None


def record(results: Path, folder: Path) -> Imported:
    """Add what results found faster to the records of a folder.

    ArtifactError if another version of TVM has made the kernels that were measured.
    """
    header = read_header(results)
    if header.tvm != tvm_version():
        raise ArtifactError(
            f"{results}: measured with tvm {header.tvm}, installed is {tvm_version()}",
            "export and replay a bundle of this version",
        )
    found = Imported(header)
    for trial in TrialLog(results).read():
        if not trial.concludes or trial.task not in header.tasks:
            continue
        made = _record(trial, header) if trial.outcome == KEPT else trial.outcome
        if isinstance(made, str):
            found.left_out[made] += 1
        else:
            found.records.append(made)
    if found.records:
        found.path = tune_db.save(folder, "cuda", found.records)
    return found


def _record(trial: Trial, header: Header) -> Record | str:
    """The record of a task's best, or why there is none."""
    facts: Mapping[str, Any] = header.tasks[trial.task]
    schedule, site = _schedule(trial.schedule, facts["facts"]["op"]), _site(facts, header.arch)
    if schedule is None:
        return "its schedule is none of this version"
    if reason := other_kernel(schedule, site, trial.knobs, trial.kernel):
        return reason
    return Record(
        site.key, trial.schedule, trial.knobs, trial.kernel, header.tvm, (), 1,
        trial.beside_defaults, float(f"{trial.error:.1e}"), header.date, header.card, header.driver,
    )  # fmt: skip


def _schedule(name: str, op: str) -> Schedule | None:
    schedules = target_of("cuda").SCHEDULES
    return next((s for s in schedules if (s.name, s.op) == (name, op)), None)


def _site(facts: Mapping[str, Any], arch: str) -> Site:
    return site_of(dict(facts["facts"]), resolve("cuda", arch).facts, target_of("cuda").planes)
