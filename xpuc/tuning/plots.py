"""The plots of a session's page, as SVG whose colours are the page's."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from xpuc.bench.roofs import Roofs
    from xpuc.tuning.report import Entry
    from xpuc.tuning.results import Speed

# Drawn with these, written as the page's CSS variables: one SVG for a light and a dark page.
_INK, _FAINT = "#000001", "#000002"
_HUES = ("#000010", "#000011", "#000012", "#000013", "#000014", "#000015")
_VARIABLES = {_INK: "currentColor", _FAINT: "var(--faint)"} | {
    hue: f"var(--hue{n})" for n, hue in enumerate(_HUES)
}
_MARKERS = "os^DvP"

_WIDTH = 9.5  # inches, 912 CSS pixels
_COLUMNS = 3
_NUMBERED = 10  # tasks whose points carry their number
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def speeds(found: Sequence[Speed]) -> str:
    """Bars of tokens a second before and after; each test has a scale of its own from 0."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.62 * len(found)), dpi=72)
        axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        figure.subplots_adjust(left=0.09, right=0.72, top=0.98, bottom=0.02, hspace=0.25)
        for ax, speed in zip(axes, found, strict=True):
            _speed_bars(ax, speed)
        return _svg(figure, "Tokens a second before and after, by test")


def _speed_bars(ax: Any, speed: Speed) -> None:
    ax.axis("off")
    ax.set(xlim=(0, max(speed.before, speed.after) or 1), ylim=(-0.6, 1.6))
    ax.text(-0.015, 0.5, speed.test, ha="right", va="center", transform=ax.transAxes)
    how = "measured" if speed.measured else "predicted"
    filled = _HUES[0] if speed.measured else "none"
    ax.barh(1, speed.before, height=0.8, color=_FAINT)
    ax.barh(0, speed.after, height=0.8, facecolor=filled, edgecolor=_HUES[0], clip_on=False)
    for y, value, note in ((1, speed.before, "before"), (0, speed.after, f"after, {how}")):
        ax.annotate(
            f"{value:,.1f}  {note}", (value, y), (5, 0), textcoords="offset points", va="center"
        )


def roofline(entries: Sequence[Entry], roofs: Roofs) -> str:
    """Gop/s over operations a byte, both logarithmic: hollow before, filled with a new record.

    Colour and marker tell operations apart. The tasks with the largest shares carry their numbers.
    """
    ops = list(dict.fromkeys(entry.op for entry in entries))
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 5.2), dpi=72)
        ax = figure.subplots()
        figure.subplots_adjust(left=0.06, right=0.98, top=0.87, bottom=0.1)
        ax.set(xscale="log", yscale="log", xlabel="operations a byte")
        ax.set_title("Gop/s", pad=8)
        points: list[tuple[float, float]] = []
        labels: list[tuple[float, float, str]] = []
        for entry in entries:
            kind = min(ops.index(entry.op), len(_HUES) - 1)
            for x, heights in _roofline_points(ax, entry, _HUES[kind], _MARKERS[kind]):
                points += [(x, y) for y in heights]
                if entry.number <= _NUMBERED:
                    labels.append((x, max(heights), str(entry.number)))
        _draw_roofs(ax, roofs)
        _number_points(ax, points, labels)
        for n, op in enumerate(ops[: len(_HUES)]):
            name = op if n < len(_HUES) - 1 or len(ops) == len(_HUES) else "others"
            ax.plot([], [], _MARKERS[n], color=_HUES[n], label=name)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_HUES), handletextpad=0.2)
        return _svg(figure, "Roofline: Gop/s over operations a byte, before and after")


def _roofline_points(
    ax: Any, entry: Entry, hue: str, marker: str
) -> Iterator[tuple[float, list[float]]]:
    """Draws a task's points; gives where: operations a byte, and Gop/s before and after."""
    for line in entry.lines:
        if line.cost is None or not line.cost.operations or not line.cost.n_bytes:
            continue
        x = line.cost.operations / line.cost.n_bytes
        heights = [line.cost.operations / line.incumbent_us / 1e3]
        if entry.result.record is not None and line.best_us is not None:
            heights.append(line.cost.operations / line.best_us / 1e3)
            ax.plot([x, x], heights, color=hue, linewidth=0.8)
            ax.plot(x, heights[1], marker, color=hue, markersize=5)
        ax.plot(x, heights[0], marker, color=hue, markersize=5, markerfacecolor="none")
        yield x, heights


def _draw_roofs(ax: Any, roofs: Roofs) -> None:
    """Sets the limits so that what is known of the roofs and their ridge shows, and draws it."""
    bandwidth, peak = roofs.bytes_s / 1e9, (roofs.operations_s or 0.0) / 1e9
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    ridge = right
    if peak:
        ridge = peak / bandwidth if bandwidth else left
        left, right, top = min(left, ridge / 2), max(right, ridge * 2), max(top, peak * 1.6)
    ax.set(xlim=(left, right), ylim=(min(bottom, left * bandwidth or bottom), top))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    if bandwidth:
        slope = (left, ridge)
        ax.plot(slope, [x * bandwidth for x in slope], color=_INK, linewidth=1)
        _label_slope(ax, bandwidth, min(ridge, top / bandwidth))
    if peak:
        ax.plot([ridge, right], [peak, peak], color=_INK, linewidth=1)
        ax.annotate(
            f"integer peak {peak:,.0f} Gop/s", (right, peak), (-4, 4),
            textcoords="offset points", ha="right",
        )  # fmt: skip


def _label_slope(ax: Any, bandwidth: float, end: float) -> None:
    """Writes the bandwidth along the middle of its line, which ends at `end`."""
    x = math.sqrt(ax.get_xlim()[0] * end)
    (x0, y0), (x1, y1) = ax.transData.transform([(x, x * bandwidth), (2 * x, 2 * x * bandwidth)])
    ax.annotate(
        f"read bandwidth {bandwidth:,.1f} GB/s", (x, x * bandwidth), (-5, 8),
        textcoords="offset points", ha="center", rotation_mode="anchor",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
    )  # fmt: skip


def _number_points(
    ax: Any, points: Sequence[tuple[float, float]], labels: Sequence[tuple[float, float, str]]
) -> None:
    """Writes the labels right of their points, each as near as is clear of the others."""
    width, height = 9.0, 8.5  # of a marker or a number, in points: the pixels of 72 dpi
    right = width + 0.5
    taken = [tuple(ax.transData.transform(point)) for point in points]
    for x, y, text in sorted(labels):
        across, up = ax.transData.transform((x, y))
        across += right
        clear = (
            move
            for move in sorted(range(-200, 201), key=abs)
            if all(abs(across - a) >= width or abs(up + move - u) >= height for a, u in taken)
        )
        move = next(clear, 0)
        taken.append((across, up + move))
        ax.annotate(
            text, (x, y), (right, move), textcoords="offset points",
            ha="center", va="center", fontsize=8,
        )  # fmt: skip


def progress(entries: Sequence[Entry]) -> str:
    """The best gain so far over the session's time, a small plot a task, all on one scale."""
    n_rows = math.ceil(len(entries) / _COLUMNS)
    ends = [trial.seconds for entry in entries for trial in entry.measured]
    gains = [trial.gain for entry in entries for trial in entry.measured]
    unit, name = (60, "minutes") if max(ends) > 300 else (1, "seconds")
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.4 + 1.5 * n_rows), dpi=72)
        axes = figure.subplots(n_rows, _COLUMNS, squeeze=False).ravel()
        figure.subplots_adjust(
            left=0.05, right=0.95, top=1 - 0.3 / (0.4 + 1.5 * n_rows),
            bottom=0.4 / (0.4 + 1.5 * n_rows), hspace=0.6, wspace=0.35,
        )  # fmt: skip
        for ax in axes[len(entries) :]:
            ax.axis("off")
        for n, (ax, entry) in enumerate(zip(axes, entries, strict=False)):
            ax.set(xlim=(0, max(ends) / unit or 1), ylim=(0.85, max(1.15, *gains) * 1.05))
            ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            ax.xaxis.set_major_locator(MaxNLocator(5))
            _best_over_time(ax, entry, unit, max(ends) / unit)
            if n + _COLUMNS >= len(entries):
                ax.set_xlabel(f"session {name}")
        return _svg(figure, "The best gain over the incumbent so far, by task")


def _best_over_time(ax: Any, entry: Entry, unit: float, end: float) -> None:
    trials = sorted(entry.measured, key=lambda trial: trial.seconds)
    times, best = [0.0], [1.0]
    for trial in trials:
        times.append(trial.seconds / unit)
        best.append(max(best[-1], trial.gain))
    ax.set_title(f"{entry.number}  {_short(entry.name)}", pad=6)
    ax.axhline(1, color=_FAINT, linewidth=0.8)
    ax.plot(times[1:], [trial.gain for trial in trials], ".", color=_FAINT, markersize=3)
    ax.step([*times, end], [*best, best[-1]], where="post", color=_HUES[0], linewidth=1.5)
    ax.annotate(
        f"{best[-1]:.2f}\N{MULTIPLICATION SIGN}",
        (end, best[-1]),
        (3, 0),
        textcoords="offset points",
        va="center",
    )


def _short(name: str, limit: int = 42) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _svg(figure: Figure, label: str) -> str:
    """The figure as an element of a page: without its own size, links, or ids that clash."""
    figure.patch.set_alpha(0)
    for ax in figure.axes:
        ax.patch.set_alpha(0)
    file = io.StringIO()
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    for drawn, variable in _VARIABLES.items():
        text = text.replace(drawn, variable)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">", text.index("<svg")) + 1 :].strip()
    return f'<svg {box[0]} role="img" aria-label="{label}">\n{body}'
