"""The page of a session: what it says, what it draws, and that it stands alone."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import xpuc.tuning
from xpuc.bench.roofs import Roofs
from xpuc.errors import XpucError
from xpuc.tune_db import Key, Measurement, Record
from xpuc.tuning import report
from xpuc.tuning.results import Cost, Findings, Speed, TaskResult
from xpuc.tuning.tasks import Task
from xpuc.tuning.trials import CRASHED, KEPT, MEASURED, NOTHING, Trial

TIMES = "\N{MULTIPLICATION SIGN}"


def task(op: str, shape: str, rows: int = 1) -> Task:
    """What the page reads of one."""
    key = Key(op, shape, rows, "llvm", "znver3")
    return cast(Task, SimpleNamespace(key=key, name=f"{op} {shape} rows={rows or 'any'}"))


def times(rows: int, us: float, default_us: float, of_roof: float) -> Measurement:
    return Measurement(rows, us, 0.01, default_us, "memory", of_roof)


def trial(seconds: float, outcome: str, *measured: Measurement) -> Trial:
    knobs = {"unroll": 4, "m_tile": int(seconds)}
    return Trial("", "linear_x8", knobs, "c0ffee", outcome, measured, seconds=seconds)


def recorded() -> TaskResult:
    """A task for any number of rows, with a record."""
    where = task("linear", "Q4_1:576x1536", rows=0)
    best = (times(16, 50.0, 80.0, 0.64), times(128, 400.0, 500.0, 0.72))
    plain = (times(16, 50.0, 100.0, 0.64), times(128, 400.0, 900.0, 0.72))  # beside the defaults
    knobs = {"prefetch_bytes": 2048}
    return TaskResult(
        where,
        baseline=(times(16, 81.0, 81.0, 0.4), times(128, 501.0, 501.0, 0.57)),
        costs=(Cost(16, 600_000, 28_311_552), Cost(128, 1_300_000, 226_492_416)),
        share=0.25,
        trials=[
            trial(20, MEASURED, *best),
            trial(30, CRASHED),
            dataclasses.replace(trial(40, KEPT, *best), knobs=knobs),
        ],
        record=Record(where.key, "linear_x8", knobs, "c0ffee", "0.27", (), 2, plain, 0.0, ""),
    )


def kept() -> TaskResult:
    """A task that no candidate was faster at."""
    return TaskResult(
        task("head", "Q8_0:49152x576"),
        baseline=(times(1, 1000.0, 1000.0, 0.9),),
        costs=(Cost(1, 28_000_000, 56_623_104),),
        share=0.5,
        trials=[trial(9, MEASURED, times(1, 1010.0, 1000.0, 0.8))],
        reason="no candidate was faster",
    )


def findings(*results: TaskResult, speeds: Sequence[Speed] = (), **changes: Any) -> Findings:
    fields: dict[str, Any] = {
        "subject": "smollm2.gguf", "target": "znver3", "boards": ("here",), "threads": 2,
        "seconds": 754.0, "roofs": Roofs(21.3e9, 188e9), "results": list(results),
        "speeds": list(speeds), "retried": 14,
    }  # fmt: skip
    return Findings(**fields | changes)


def page(tmp_path: Path, of: Findings) -> str:
    path = tmp_path / "made" / "report.html"
    report.write(of, path)
    return path.read_text(encoding="utf-8")


def plots(html: str) -> list[str]:
    return re.findall(r"<svg .*?</svg>", html, flags=re.DOTALL)


def cells(html: str) -> list[list[str]]:
    """The rows of all tables, as text."""
    plain = html.replace(TIMES, "x").replace("\N{EN DASH}", "-")
    rows = re.findall(r"<tr>(.*?)</tr>", plain, flags=re.DOTALL)
    texts = [re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]+>", " ", text).strip() for text in row] for row in texts if row]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a session that found something of everything."""
    return page(
        tmp_path_factory.mktemp("full"),
        findings(
            recorded(),
            kept(),
            speeds=[Speed("tg128", 148.2, 171.9, True), Speed("pp512", 1902.7, 2210.4, False)],
            records_path="/home/me/tune_db/llvm.jsonl",
            notes={"next": "xpuc compile smollm2.gguf", "stopped": "by Ctrl-C"},
        ),
    )


@pytest.mark.parametrize(
    "text",
    [
        "1 of 2 tasks has a new record.", "znver3, 2 threads", "12 min 34 s, 3 trials",
        "21.3 GB/s", "188 Gop/s", "in <code>/home/me/tune_db/llvm.jsonl</code>",
        "14, because the machine drifted", "<pre>xpuc compile smollm2.gguf</pre>", "by Ctrl-C",
    ],
)  # fmt: skip
def test_the_head_says(full: str, text: str) -> None:
    assert text in full


def test_the_tables_have_the_figures(full: str) -> None:
    assert cells(full) == [
        ["tg128", "148.2", "171.9", "1.16x", "measured"],
        ["pp512", "1,902.7", "2,210.4", "1.16x", "predicted"],
        ["1", "head Q8_0:49152x576 rows=1", "50 %", "1", "1,000", "1,010", "0.99x", "81 %", "80 %",
         "memory", "1", "no candidate was faster", "m_tile=9 unroll=4"],
        ["2", "linear Q4_1:576x1536 rows=any", "25 %", "16", "80.0", "50.0", "1.60x", "40 %",
         "64 %", "memory", "2", "record  1 crashed", "prefetch_bytes=2048"],
        ["128", "500", "400", "1.25x", "58 %", "72 %", "memory"],
    ]  # fmt: skip


def test_the_plots_say_what_they_draw(full: str) -> None:
    speeds, roofline, progress = plots(full)
    assert "148.2  before" in speeds
    assert "171.9  after, measured" in speeds
    assert "2,210.4  after, predicted" in speeds
    assert "read bandwidth 21.3 GB/s" in roofline
    assert "integer peak 188 Gop/s" in roofline
    assert "2 linear Q4_1:576x1536 rows=any" in re.sub(" +", " ", progress)
    assert f">1.25{TIMES}<" in progress  # the trial that gained, where it gained least
    assert f">1.00{TIMES}<" in progress  # the one that did not


def test_the_plots_have_the_colours_of_the_page(full: str) -> None:
    used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", "".join(plots(full))))
    assert used - {"none", "currentColor"}
    assert all(c in ("none", "currentColor") or c.startswith("var(--") for c in used)
    defined = re.findall(r"(--\w+): #", full)
    assert set(re.findall(r"var\((--\w+)\)", full)) <= set(defined)
    assert len(defined) == 2 * len(set(defined))  # light and dark


def test_the_page_needs_nothing_but_itself(full: str) -> None:
    assert "http" not in full
    assert not re.search(r"<script|<link|@import|src=|url\((?!#)", full)
    ids = re.findall(r' id="([^"]+)"', full)
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', full))
    assert referred
    assert referred <= set(ids)


def test_a_time_taken_again_at_the_end_is_the_one_that_counts(tmp_path: Path) -> None:
    result = kept()
    result.trials += [
        trial(10, MEASURED, times(1, 900.0, 1000.0, 0.9)),
        trial(40, NOTHING, times(1, 990.0, 1000.0, 0.9)),
    ]
    again = recorded()
    again.trials.append(trial(50, KEPT, times(16, 64.0, 80.0, 0.5), times(128, 499.0, 500.0, 0.6)))
    rows = cells(page(tmp_path, findings(result, again)))
    assert [row[-9:-3] for row in rows if len(row) > 7] == [
        ["1,000", "990", "1.01x", "89 %", "90 %", "memory"],
        ["80.0", "64.0", "1.25x", "40 %", "50 %", "memory"],
    ]
    assert [row[-3:] for row in rows if len(row) > 7] == [
        ["2", "no candidate was faster", "m_tile=40 unroll=4"],
        ["2", "record  1 crashed", "m_tile=50 unroll=4"],
    ]


def test_names_are_text(tmp_path: Path) -> None:
    odd = dataclasses.replace(recorded(), task=task("linear", "<b>$x$</b>&"))
    html = page(tmp_path, findings(odd, subject="<b>bold</b>", notes={"next": "a && b > c"}))
    assert "<b>" not in html
    assert "Tuning of &lt;b&gt;bold&lt;/b&gt;" in html
    assert html.count("&lt;b&gt;$x$&lt;/b&gt;&amp;") == 2  # the table and a plot's title
    assert "a &amp;&amp; b &gt; c" in html


@pytest.mark.parametrize("roofs", [Roofs(21.3e9, None), Roofs(0.0, 188e9), Roofs(0.0, None)])
def test_a_roof_that_is_not_known_is_not_drawn(tmp_path: Path, roofs: Roofs) -> None:
    html = page(tmp_path, findings(kept(), roofs=roofs))
    assert ("not measured" in html) == (roofs.operations_s is None)
    assert ("integer peak 188" in html) == (roofs.operations_s is not None)
    assert ("read bandwidth 21.3" in html) == (roofs.bytes_s > 0)


class Balance(HTMLParser):
    """Fails on a page whose elements do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "of",
    [
        findings(boards=(), seconds=0.0, roofs=Roofs(0.0, None)),
        findings(TaskResult(task("linear", "Q4_0:32x64")), speeds=[Speed("tg128", 0.0, 0.0, True)]),
        findings(dataclasses.replace(kept(), trials=[trial(1, CRASHED)])),
        pytest.param(findings(*(kept() for _ in range(14))), marks=pytest.mark.slow),
    ],
    ids=["nothing", "not reached", "nothing right", "many"],
)
def test_the_page_is_whole_whatever_was_found(tmp_path: Path, of: Findings) -> None:
    parser = Balance()
    parser.feed(page(tmp_path, of))
    assert parser.open == []


def test_a_task_that_was_not_reached_says_so(tmp_path: Path) -> None:
    html = page(tmp_path, findings(TaskResult(task("linear", "Q4_0:32x64"))))
    ((number, name, *_, outcome, knobs),) = cells(html)
    assert (number, name) == ("1", "linear Q4_0:32x64 rows=1")
    assert (outcome, knobs) == ("not reached", "-")
    assert html.count("<svg ") == 0


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "xpuc.tuning.plots", raising=False)
    monkeypatch.delattr(xpuc.tuning, "plots", raising=False)
    with pytest.raises(XpucError, match="the report needs matplotlib") as raised:
        report.write(findings(), tmp_path / "report.html")
    assert raised.value.hint == "pip install 'xpuc[tune]'"
    assert not any(tmp_path.iterdir())
