"""What a session found, as a page: one HTML file that needs no network and no script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from xpuc.errors import XpucError
from xpuc.files import write_whole
from xpuc.tuning.trials import MEASURED, Trial

if TYPE_CHECKING:
    from xpuc.tune_db import Measurement
    from xpuc.tuning.results import Cost, Findings, TaskResult

_CURVES = 12  # tasks whose search is drawn
_TEMPLATE = "report.html.jinja"
_NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Line:
    """One number of rows of a task: the incumbent and the best candidate, medians in µs.

    Where there is a candidate, both were measured in turns. `of_roof` is the incumbent's share of
    what `roof` allows.
    """

    rows: int
    incumbent_us: float
    best_us: float | None
    roof: str
    of_roof: float
    cost: Cost | None

    @property
    def gain(self) -> float | None:
        return self.incumbent_us / self.best_us if self.best_us else None

    @property
    def best_of_roof(self) -> float | None:
        return self.of_roof * self.gain if self.gain else None


@dataclass(frozen=True)
class Entry:
    """A task as the page shows it; `number` is its place by share, from 1."""

    number: int
    result: TaskResult

    @property
    def name(self) -> str:
        return self.result.task.name

    @property
    def op(self) -> str:
        return self.result.task.key.op

    @cached_property
    def measured(self) -> tuple[Trial, ...]:
        """The trials that were right, and so have a time."""
        return tuple(t for t in self.result.trials if t.outcome == MEASURED and t.measured)

    @property
    def n_trials(self) -> int:
        return sum(not t.concludes for t in self.result.trials)

    @property
    def failed(self) -> list[str]:
        """How many trials ended without a time, by outcome: `2 wrong`."""
        outcomes = Counter(t.outcome for t in self.result.trials if not t.concludes)
        return [f"{n} {outcome}" for outcome, n in outcomes.items() if outcome != MEASURED]

    @cached_property
    def best(self) -> tuple[tuple[Measurement, ...], Mapping[str, int]]:
        """Times and knobs of the candidate that was measured again at the end, else of the best."""
        if confirmed := [t for t in self.result.trials if t.concludes and t.measured]:
            return confirmed[-1].measured, confirmed[-1].knobs
        if not self.measured:
            return (), {}
        trial = max(self.measured, key=lambda t: t.gain)
        return trial.measured, trial.knobs

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """One for each number of rows that was measured."""
        costs = {cost.rows: cost for cost in self.result.costs}
        lines = {
            m.rows: Line(m.rows, m.us, None, m.roof, m.of_roof, costs.get(m.rows))
            for m in self.result.baseline
        } | {
            m.rows: Line(
                m.rows, m.default_us, m.us, m.roof, m.beside.of_roof, costs.get(m.rows),
            )
            for m in self.best[0]
        }  # fmt: skip
        return tuple(lines[rows] for rows in sorted(lines))


def write(findings: Findings, path: Path) -> None:
    """Writes the page of a session. XpucError without matplotlib."""
    try:
        from xpuc.tuning import plots
    except ImportError:
        raise XpucError("the report needs matplotlib", "pip install 'xpuc[tune]'") from None
    by_share = sorted(findings.results, key=lambda result: -result.share)
    entries = [Entry(number, result) for number, result in enumerate(by_share, 1)]
    with_costs = [e for e in entries if any(line.cost for line in e.lines)]
    curves = [e for e in entries if e.measured][:_CURVES]
    page = _template().render(
        findings=findings,
        entries=entries,
        n_records=sum(entry.result.record is not None for entry in entries),
        n_trials=sum(entry.n_trials for entry in entries),
        n_searched=sum(bool(entry.measured) for entry in entries),
        n_curves=len(curves),
        speeds_svg=plots.speeds(findings.speeds) if findings.speeds else "",
        roofline_svg=plots.roofline(with_costs, findings.roofs) if with_costs else "",
        progress_svg=plots.progress(curves) if curves else "",
    )
    write_whole(path, page)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: Mapping[str, Any] = {
        "figures": _figures, "times": _times, "percent": _percent, "duration": _duration,
        "knobs": _knobs,
    }  # fmt: skip
    environment.filters.update(filters)
    text = resources.files("xpuc.tuning").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text)


def _figures(value: float | None) -> str:
    """Three significant figures, all digits before the point."""
    if value is None:
        return _NONE
    decimals = next((d for d, limit in ((2, 10), (1, 100)) if abs(value) < limit), 0)
    return f"{value:,.{decimals}f}"


def _times(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}\N{MULTIPLICATION SIGN}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts: Sequence[tuple[int, str]] = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or "0 s"


def _knobs(knobs: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(knobs.items())) or _NONE
