"""Candidates of a model's tasks compiled for a GPU, the best of them in a bundle; no GPU needed.

Of each task every value its knobs may have is built and compiled, judged by its code (prefilter.py)
and, of those that stand, the first few by the model's order are kept, with what is in use today.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xpuc
from xpuc.codegen import tvm_runtime
from xpuc.codegen.compile import SEGMENT_TOKENS
from xpuc.schedules import Launch, kernel_digest, launches, pick, target_of, tvm_version
from xpuc.tune_db import TuneDb
from xpuc.tuning import bundle, cases, device_programs
from xpuc.tuning.candidates import Candidate
from xpuc.tuning.inputs import matrix_blocks
from xpuc.tuning.prefilter import KernelCode, fewest_cycles, predicted_us, refusal
from xpuc.tuning.programs import loops_of, program_of
from xpuc.tuning.tasks import Subject, Task

CANDIDATES = 6  # of a task that are timed, besides what is in use
_ALIKE = 1.05  # times as long as the best, by a model that is no better than that
Knobs = Mapping[str, int]


@dataclass
class Tried:
    """Knobs of a task: what they launch, or why they are not timed; `us` ranks them."""

    knobs: Knobs
    kernel: str = ""
    launches: tuple[Launch, ...] = ()
    code: tuple[KernelCode, ...] = ()
    us: float = 0.0
    refused: str = ""


@dataclass
class Shortlist:
    """A task's candidates: what is in use, the defaults if those are others, and who comes next."""

    task: Task
    tried: list[Tried] = field(default_factory=list)
    kept: list[Tried] = field(default_factory=list)

    @property
    def refused(self) -> list[Tried]:
        return [each for each in self.tried if each.refused]


def shortlist(task: Task, db: TuneDb, most: int = CANDIDATES) -> Shortlist:
    """The candidates of a task that are worth timing, at most `most` besides those in use."""
    schedule = task.schedule
    choice = pick(task.site, target_of(task.target.kind).SCHEDULES, db, deterministic=False)
    own = choice.knobs if choice and choice.schedule.name == schedule.name else schedule.knobs()
    in_use, defaults = dataclasses.asdict(own), dataclasses.asdict(schedule.knobs())
    found = Shortlist(task)
    seen: set[str] = set()
    for knobs in (in_use, defaults, *_grid(task, defaults)):
        tried = _tried(task, knobs)
        if tried.refused or tried.kernel not in seen:
            found.tried.append(tried)
            seen.add(tried.kernel)
    _judge(found)
    first = [t for t in found.tried[:2] if t.knobs in (in_use, defaults)]
    others = [t for t in found.tried if not t.refused and t not in first]
    found.kept = first + _spread(first, others, most)
    return found


def _spread(first: Sequence[Tried], others: Sequence[Tried], most: int) -> list[Tried]:
    """The best by the model; of those it cannot tell apart, what differs most from the rest."""
    left, chosen = sorted(others, key=lambda t: t.us), list(first)
    while left and len(chosen) < len(first) + most:
        alike = [t for t in left if t.us <= _ALIKE * left[0].us]
        chosen.append(max(alike, key=lambda t: (_distance(t, chosen), -t.us)))
        left.remove(chosen[-1])
    return chosen[len(first) :]


def _distance(tried: Tried, chosen: Sequence[Tried]) -> int:
    """Knobs in which it differs from the nearest of them."""
    return min(sum(tried.knobs[k] != c.knobs[k] for k in tried.knobs) for c in chosen)


def _grid(task: Task, defaults: Knobs) -> Iterator[Knobs]:
    space = task.schedule.space(task.site)
    for values in itertools.product(*space.values()):
        yield {**defaults, **dict(zip(space, values, strict=True))}


def _tried(task: Task, knobs: Knobs) -> Tried:
    try:
        made = task.schedule.knobs_of(knobs)
        parts = launches(task.schedule, task.site, made)
    except AssertionError as reason:
        return Tried(knobs, refused=str(reason) or "no kernel of these knobs")
    return Tried(knobs, kernel_digest(task.schedule, task.site, made), tuple(parts))


def _judge(found: Shortlist) -> None:
    """Compile what is built, refuse what has no chance; the first is what is in use."""
    task, built = found.task, [t for t in found.tried if not t.refused]
    cost = cases.cost(task.site, task.rows[-1])
    symbols = cases.symbols(task.site, cost.rows)
    codes = device_programs.compiled([t.launches for t in built], task.target.cpu, symbols)
    for tried, code in zip(built, codes, strict=True):
        if isinstance(code, str):
            tried.refused = code
        else:
            tried.code = code
    standing = [t for t in built if not t.refused]
    beside = found.tried[0].code
    fewest = fewest_cycles(t.code for t in standing)
    seen: set[tuple[object, ...]] = set()
    for tried in standing:
        identity = tuple(each.identity for each in tried.code)
        if identity and identity in seen:
            tried.refused = "the machine code of other knobs"
            continue
        seen.add(identity)
        tried.us = predicted_us(tried.code, cost.operations)
        if tried is not found.tried[0]:
            tried.refused = refusal(tried.code, beside, fewest)


def export(
    subject: Subject,
    db: TuneDb,
    path: Path,
    *,
    most: int = CANDIDATES,
    watch: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[Shortlist]:
    """Write a bundle of a subject's tasks, what takes longest first; what was found of each."""
    tasks = sorted(subject.tasks, key=_weight, reverse=True)
    (arch,) = subject.target.archs
    found: list[Shortlist] = []
    with tempfile.TemporaryDirectory(prefix="xpuc-tune-") as name:
        folder = Path(name)
        bundled = []
        for i, task in enumerate(tasks):
            watch(task.name, i, len(tasks))
            found.append(shortlist(task, db, most))
            bundled.append(_bundled(found[-1], f"{i}.so", folder))
        kernels, loops = loops_of(subject.target)
        device_programs.build(kernels, arch, folder / bundle.ROOFS)
        tvm_runtime.bundle(folder, "cuda")
        _save_blocks(tasks, folder)
        manifest = bundle.BundleManifest(
            arch, tvm_version(), tvm_runtime.versions().tvm_ffi, xpuc.__version__,
            SEGMENT_TOKENS, tuple(loops), tuple(bundled),
        )  # fmt: skip
        bundle.write(path, manifest, folder)
    return found


def _weight(task: Task) -> int:
    """Bytes a task reads in the step it matters most in."""
    return max(task.uses.values(), default=0) * cases.cost(task.site, task.rows[-1]).n_bytes


def _bundled(found: Shortlist, library: str, folder: Path) -> bundle.BundledTask:
    """The task's library in the folder, and what the manifest says of it."""
    task = found.task
    defaults = dataclasses.asdict(task.schedule.knobs())
    named = [
        [dataclasses.replace(p, kernel=device_programs.named(p, i)) for p in tried.launches]
        for i, tried in enumerate(found.kept)
    ]
    kernels = [part.kernel for parts in named for part in parts]
    device_programs.build(kernels, task.target.cpu, folder / library)
    candidates = tuple(
        Candidate(
            dict(tried.knobs),
            tried.kernel,
            program_of(task.site, parts),
            is_default=tried.knobs == defaults,
        )
        for tried, parts in zip(found.kept, named, strict=True)
    )
    return bundle.BundledTask(
        task.name, task.schedule.name, task.site.facts(),
        tuple(tuple(int(p.ty.shape[0]) for p in w.planes) for w in task.site.weights),
        task.rows, tuple(cases.cost(task.site, rows) for rows in task.rows),
        cases.layout_of(task.site).tile_rows, task.schedule.tolerance, library, candidates,
    )  # fmt: skip


def _save_blocks(tasks: Sequence[Task], folder: Path) -> None:
    blocks = bundle.Blocks(folder)
    for format in sorted({w.format for task in tasks for w in task.site.weights}):
        raw = matrix_blocks(format)
        blocks.save(format, raw, target_of("cuda").pack(format, raw))
