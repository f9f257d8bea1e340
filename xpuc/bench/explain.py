"""What an operation of an artifact takes, beside what its manifest says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpuc.artifact import Manifest
from xpuc.bench.cases import Case
from xpuc.bench.ours import Ours
from xpuc.bench.profile import KernelRow, Profile, Profiler
from xpuc.bench.roofs import RoofLoops, Roofs, combined

_ROUNDS = 5
_PROMPT = 512


@dataclass(frozen=True)
class Step:
    """The measured step of an entry point."""

    profile: Profile
    roofs: Roofs
    threads: int

    @property
    def step_us(self) -> float:
        return self.profile.step_us

    @property
    def kernels(self) -> Mapping[str, KernelRow]:
        """The rows by the kernels' names."""
        return {row.kernel: row for row in self.profile.rows}

    def lines(self) -> Iterator[str]:
        """The step as a whole."""
        said = f"{self.profile.step}, {self.step_us:,.0f} us, {self.threads} threads"
        yield f"step: {said}; {self.roofs}"


def measure(artifact: Path, manifest: Manifest, entry: str, depth: int, threads: int) -> Step:
    """Run the step of an entry point over and over, at a depth of context."""
    (point,) = (each for each in manifest.entry_points if each.name == entry)
    n = min(_PROMPT, manifest.max_chunk)
    case = Case("tg", 2, depth, point.rows) if point.rows else Case("pp", n, depth)
    ours = Ours.load(artifact, threads, [case])
    ours.warm_up()
    loops = RoofLoops(ours.model, manifest)
    profiler = Profiler(ours.model, manifest, ours.step(case), tail=point.tail)
    measured = []
    for _ in range(_ROUNDS):
        profiler.round()
        measured.append(loops.measure())
    roofs = combined(measured, max)
    return Step(profiler.profile(roofs), roofs, threads)


@dataclass(frozen=True)
class Explained:
    """An operation of an entry point: how it runs and why, bytes and microseconds of a call."""

    name: str
    uses: int
    schedule: str
    knobs: Mapping[str, int]
    reason: str
    kernels: tuple[str, ...]
    n_bytes: int | None = None
    roofline_us: float | None = None
    record_us: float | None = None
    measured_us: float | None = None
    limited_by: str | None = None
    code: tuple[Mapping[str, Any], ...] = ()  # ptxas rows of its kernels, for a GPU

    @property
    def predicted_us(self) -> float | None:
        """By the record where there is one, else by the machine's limits."""
        return self.record_us if self.record_us is not None else self.roofline_us

    @property
    def pct_roofline(self) -> float | None:
        if not self.roofline_us or not self.measured_us:
            return None
        return 100 * self.roofline_us / self.measured_us

    def as_json(self) -> dict[str, Any]:
        """All of it, rounded."""
        numbers = ("roofline_us", "record_us", "predicted_us", "measured_us", "pct_roofline")
        return {
            "name": self.name, "uses": self.uses, "schedule": self.schedule,
            "knobs": dict(self.knobs), "reason": self.reason, "kernels": list(self.kernels),
            "bytes": self.n_bytes, "limited_by": self.limited_by,
            **({"ptxas": [dict(row) for row in self.code]} if self.code else {}),
        } | {name: _rounded(getattr(self, name)) for name in numbers}  # fmt: skip

    def lines(self) -> Iterator[tuple[str, str]]:
        """For people."""
        knobs = " ".join(f"{name}={value}" for name, value in self.knobs.items())
        yield "schedule", f"{self.schedule}" + (f" ({knobs})" if knobs else "")
        yield "because", self.reason
        yield "kernels", ", ".join(self.kernels) + f", {self.uses} times a step"
        for row in self.code:
            spilled = row["spill_store_bytes"] + row["spill_load_bytes"]
            yield (
                row["arch"],
                (
                    f"{row['kernel']}: {row['registers']} registers, {row['shared_bytes']:,} bytes"
                    f" shared, {spilled} spilled"
                ),
            )
        if self.measured_us is None:
            return
        parts = [f"{self.measured_us:,.1f} us"]
        if self.predicted_us:
            of = "record" if self.record_us is not None else f"limit by {self.limited_by}"
            parts.append(f"{self.predicted_us:,.1f} us predicted ({of})")
        if self.pct_roofline is not None:
            parts.append(f"{self.pct_roofline:.0f} % of the roofline")
        yield "takes", ", ".join(parts)
        if self.n_bytes:
            yield "reads", f"{self.n_bytes:,} bytes of weights and K/V"


def explain(
    operation: Mapping[str, Any],
    entry: str,
    step: Step | None,
    device: Mapping[str, Any] | None = None,
) -> Explained:
    """One operation of the manifest, with what its kernels took if the step was measured.

    `device` is the manifest's decision of that name, which artifacts for GPUs have.
    """
    uses = int(operation["uses"][entry])
    record = next((m["us"] for m in reversed(operation["measured"])), None)
    said = Explained(
        operation["name"], uses, operation["schedule"], operation["knobs"], operation["reason"],
        tuple(operation["kernels"]), record_us=record, code=_code(operation["kernels"], device),
    )  # fmt: skip
    if step is None:
        return said
    rows = [step.kernels[name] for name in operation["kernels"] if name in step.kernels]
    launches = [row.launches for row in rows]
    limits = {row.limited_by for row in rows if row.limited_by}
    return Explained(
        said.name, uses, said.schedule, said.knobs, said.reason, said.kernels,
        n_bytes=sum(row.n_bytes // n for row, n in zip(rows, launches, strict=True)),
        roofline_us=sum(row.limit_us / n for row, n in zip(rows, launches, strict=True)),
        record_us=record,
        measured_us=sum(row.us / n for row, n in zip(rows, launches, strict=True)),
        limited_by=min(limits) if limits else None, code=said.code,
    )  # fmt: skip


def _code(
    kernels: Sequence[str], device: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], ...]:
    """The rows that ptxas reported of these kernels."""
    names = {f"{kernel}_kernel" for kernel in kernels}
    rows = device["kernels"] if device else ()
    return tuple(row for row in rows if row["kernel"] in names)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
