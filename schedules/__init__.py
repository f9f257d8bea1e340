"""How a kernel runs on a target: the place it runs at, the schedules that may serve it, the choice.

A target's folder lists its schedules in order; the first that accepts a site builds its kernels.
The knobs it builds them with are data: those of the tune database where it holds a record of the
site, else its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xpuc.tune_db import Key, TuneDb

Var = Any
Type = Any


@dataclass(frozen=True)
class Weight:
    """A packed matrix as an operand: its format, its shape, its planes in the target's layout."""

    format: str
    rows: int
    columns: int
    planes: tuple[Var, ...]


@dataclass(frozen=True)
class TargetFacts:
    """What schedules decide by: the kind (llvm, cuda), the CPU or GPU, its features."""

    kind: str
    cpu: str
    features: frozenset[str]


@dataclass(frozen=True)
class Site:
    """An operation at its place. `n` is the number of rows, None if it is known at run time only.

    `operands` are the activations and vectors, tuples flattened; `weights` the packed matrices, in
    order.
    """

    op: str
    attrs: dict[str, Any]
    n: int | None
    operands: tuple[Var, ...]
    weights: tuple[Weight, ...]
    result: Type
    target: TargetFacts
    block_tokens: int
    kv_dtype: str

    @property
    def key(self) -> Key:
        """What the tune database knows this site by."""
        if self.weights:
            parts = [f"{w.format}:{w.rows}x{w.columns}" for w in self.weights]
        else:
            # Rows are symbols or the bucket; what tells sites apart is the last axis and the rank.
            shapes = [o.ty.shape for o in self.operands]
            columns = "x".join(_size(s[-1]) if len(s) > 1 else "1d" for s in shapes)
            plain = {k: v for k, v in self.attrs.items() if isinstance(v, int | str)}
            parts = [columns, *(f"{k}={v}" for k, v in sorted(plain.items()))]
        return Key(self.op, ",".join(parts), self.n or 0, self.target.kind, self.target.cpu)


def _size(dimension: Any) -> str:
    """A dimension as text: its number, or its symbol's name."""
    return str(getattr(dimension, "value", dimension))


class Emitter(Protocol):
    """What a schedule emits launches through."""

    def launch(self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type]) -> Var:
        """Launch a kernel that writes new tensors; their variable, a tuple if they are several."""

    def launch_in_place(
        self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type], inplace: Sequence[int]
    ) -> Var:
        """Launch a kernel whose i-th output is its input `inplace[i]`, or new where that is -1."""

    def item(self, value: Var, index: int) -> Var:
        """One of several results."""

    def emit(self, value: Any) -> Var:
        """Name a value that needs no launch, such as a tuple."""


@dataclass(frozen=True)
class Schedule:
    """One way to run an operation. `emit` launches its kernels and gives the result's variable."""

    name: str
    op: str
    accepts: Callable[[Site], bool]
    emit: Callable[[Emitter, Site, dict[str, Any]], Var]
    batch_invariant: bool = True  # a row's bits do not depend on the other rows of the call


@dataclass(frozen=True)
class Choice:
    """The schedule taken for a site, its knobs and where they come from: `tuned` or `default`."""

    schedule: Schedule
    knobs: dict[str, Any]
    origin: str


def pick(
    site: Site, schedules: Sequence[Schedule], db: TuneDb, *, deterministic: bool
) -> Choice | None:
    """The first schedule that accepts the site; None leaves it to the target-free kernel."""
    for schedule in schedules:
        if schedule.op != site.op or not schedule.accepts(site):
            continue
        if deterministic and not schedule.batch_invariant:
            continue
        # Only kernels on weights have knobs so far: nothing else can be called tuned.
        record = db.lookup(site.key, schedule.name) if site.weights else None
        return Choice(schedule, record.knobs if record else {}, "tuned" if record else "default")
    return None
