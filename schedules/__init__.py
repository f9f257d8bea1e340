"""How a kernel runs on a target: the place it runs at, the schedules that may serve it, the choice.

A target's folder lists its schedules in order; the first that accepts a site builds its kernels.
The knobs it builds them with are data: those of the tune database where it holds a record of the
site, else its defaults.

site.py       an operation at its place, and what names it
launches.py   what a schedule would launch there, and the digest of it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from xpuc.artifact import SUFFIXES, Tail
from xpuc.schedules.launches import Launch, kernel_digest, launches
from xpuc.schedules.site import Site, TargetFacts, Type, Var, Weight, site_of
from xpuc.tune_db import Record, TuneDb

__all__ = [
    "Choice", "Copies", "Emitter", "Launch", "NoKnobs", "RoofLoop", "Schedule", "Site", "Space",
    "Target", "TargetFacts", "Type", "Var", "Weight", "kernel_digest", "launches", "other_kernel",
    "pick", "serving", "site_of", "tails_of", "target_of",
]  # fmt: skip


class Emitter(Protocol):
    """What a schedule emits launches through."""

    def launch(self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type]) -> Var:
        """Launch a kernel that writes new tensors; their variable, a tuple if they are several."""

    def launch_in_place(
        self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type], inplace: Sequence[int]
    ) -> Var:
        """Launch a kernel whose i-th output is its input `inplace[i]`, or new where that is -1."""

    def zeros(self, ty: Type) -> Var:
        """A tensor of the step's that is zeros; who writes to it leaves zeros again."""

    def item(self, value: Var, index: int) -> Var:
        """One of several results."""

    def emit(self, value: Any) -> Var:
        """Name a value that needs no launch, such as a tuple."""


@dataclass(frozen=True)
class NoKnobs:
    """The knobs of a schedule that has none."""


Space = Mapping[str, Sequence[int]]  # the values worth trying, by knob


def _no_space(site: Site) -> Space:
    return {}


@dataclass(frozen=True)
class Schedule:
    """One way to run an operation. `emit` launches its kernels and gives the result's variable.

    `knobs` is a frozen dataclass of whole numbers, its defaults those of an untuned build; `space`
    declares what a tuning session may try at a site. No knob changes a bit of the result.
    `tolerance` is how far a result may be off one of double precision, in terms of the largest.
    """

    name: str
    op: str
    accepts: Callable[[Site], bool]
    emit: Callable[[Emitter, Site, Any], Var]
    knobs: type[Any] = NoKnobs
    space: Callable[[Site], Space] = _no_space
    batch_invariant: bool = True  # a row's bits do not depend on the other rows of the call
    tolerance: float = 1e-5  # sums of single precision

    def knobs_of(self, values: Mapping[str, int]) -> Any | None:
        """The knobs of these values, the rest at their defaults; None if there is no such knob."""
        known = {f.name for f in dataclasses.fields(self.knobs)}
        return self.knobs(**values) if set(values) <= known else None


@dataclass(frozen=True)
class RoofLoop:
    """A kernel that measures a limit of the machine: int32 (elements,) -> int32 of shape `result`.

    `facts` says what a call of it is: bytes or operations.
    """

    name: str
    kernel: Any
    elements: int
    result: tuple[int, ...]
    facts: Mapping[str, int]


class Copies(Protocol):
    """What a target knows of int8 copies of packed matrices, which its prompts may read."""

    def pays(self, format: str) -> bool:
        """Whether prompts take fewer instructions with a copy than with the packed matrix."""

    def why_not(self, format: str) -> str:
        """Why a format has no copies, in a few words."""

    def element_planes(self, format: str) -> tuple[str, ...]:
        """The planes of the packed matrix that `widen` reads, in order."""

    def codes_per_word(self, format: str) -> int:
        """Elements of a matrix for each word of the first of them."""

    def widen(self, format: str) -> Any:
        """The kernel: those planes to int8 (rows * columns,)."""


class Target(Protocol):
    """What the package of a target has: its schedules, and its weights in memory."""

    SCHEDULES: tuple[Schedule, ...]
    COPIES: Copies | None

    def planes(self, format: str, rows: int, k: int) -> Sequence[Any]:
        """The planes a matrix of `rows` rows and `k` columns is packed into."""

    def pack(self, format: str, raw: np.ndarray) -> Sequence[np.ndarray]:
        """A matrix's bytes (rows, row bytes) as the arrays of its planes, in order."""

    def tile_rows(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Rows a prefill tile of attention may have."""

    def roof_loops(self, facts: TargetFacts) -> Sequence[RoofLoop]:
        """What measures its limits: `memory_read`, and `int8_peak` where it has one."""


def target_of(kind: str) -> Target:
    """The package of a kind of target."""
    return cast("Target", import_module(f"{__name__}.{kind}"))


def tails_of(target: Target) -> tuple[Tail, ...]:
    """What a step may end in: `sampled` where a schedule of the target samples."""
    samples = any(schedule.op == "sample" for schedule in target.SCHEDULES)
    return tuple(tail for tail in SUFFIXES if tail != "sampled" or samples)


@dataclass(frozen=True)
class Choice:
    """The schedule taken for a site, its knobs, where they come from (`tuned`, `default`), why."""

    schedule: Schedule
    knobs: Any
    origin: str
    reason: str
    record: Record | None = None


def pick(
    site: Site, schedules: Sequence[Schedule], db: TuneDb, *, deterministic: bool
) -> Choice | None:
    """The schedule that serves the site and its knobs; None leaves it to the target-free kernel."""
    schedule = serving(site, schedules, deterministic=deterministic)
    return None if schedule is None else _choice(site, schedule, db)


def serving(site: Site, schedules: Sequence[Schedule], *, deterministic: bool) -> Schedule | None:
    """The first schedule that accepts the site."""
    for schedule in schedules:
        if schedule.op != site.op or not schedule.accepts(site):
            continue
        if schedule.batch_invariant or not deterministic:
            return schedule
    return None


def _choice(site: Site, schedule: Schedule, db: TuneDb) -> Choice:
    if not dataclasses.fields(schedule.knobs):
        return Choice(schedule, schedule.knobs(), "default", "nothing to tune")
    record = db.lookup(site.key, schedule.name)
    if record is None:
        return Choice(schedule, schedule.knobs(), "default", "no record")
    reason = _unfit(record, schedule, site)
    if reason:
        db.ignored[reason] += 1
        return Choice(schedule, schedule.knobs(), "default", f"record left out: {reason}")
    knobs = schedule.knobs_of(record.knobs)
    return Choice(schedule, knobs, "tuned", f"record of {record.date}", record)


def _unfit(record: Record, schedule: Schedule, site: Site) -> str | None:
    """Why a record cannot be used here, if so."""
    if record.tvm != tvm_version():
        return f"measured with tvm {record.tvm}"
    if not set(record.features) <= site.target.features:
        return "measured with CPU features this target lacks"
    return other_kernel(schedule, site, record.knobs, record.kernel)


def other_kernel(
    schedule: Schedule, site: Site, knobs: Mapping[str, int], kernel: str
) -> str | None:
    """Why knobs that were measured do not make the kernel of this digest here; None if they do."""
    try:
        made = schedule.knobs_of(knobs)
        if made is None:
            return "its knobs are not those of this version"
        if kernel_digest(schedule, site, made) != kernel:
            return "measured on another version of the kernel"
    except Exception:  # whatever a schedule says of values that it does not take
        return "its knobs make no kernel in this version"
    return None


@cache
def tvm_version() -> str:
    """The installed compiler's."""
    import tvm

    return str(tvm.__version__)
