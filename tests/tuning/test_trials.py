"""The log of a session's trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpuc.tune_db import Measurement
from xpuc.tuning.trials import (
    CRASHED,
    KEPT,
    MEASURED,
    NOTHING,
    REFUSED,
    WRONG,
    Trial,
    TrialLog,
)


def trial(number: int, outcome: str = MEASURED, *us: float) -> Trial:
    measured = tuple(
        Measurement(16 * (i + 1), t, 0.01, 100.0, "int8", 0.5) for i, t in enumerate(us)
    )
    return Trial(
        "linear Q4_1:576x576 rows=1", "linear_x8", {"unroll": number}, f"{number:x}", outcome,
        measured, 1e-7, "board #1", float(number), "a 'detail'\nof two lines",
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> TrialLog:
    return TrialLog(tmp_path / "trials" / "llvm.jsonl")


def test_what_is_appended_is_read_again(log: TrialLog) -> None:
    assert list(log.read()) == []
    written = [
        trial(i, outcome, *us)
        for i, (outcome, us) in enumerate(
            [(MEASURED, (80.0, 90.0)), (WRONG, ()), (CRASHED, ()), (REFUSED, ()), (KEPT, (80.0,))]
        )
    ]
    for n, each in enumerate(written, 1):
        log.append(each)
        assert list(TrialLog(log.path).read()) == written[:n]


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_line_that_was_cut_off_is_left_out_and_the_next_is_not(log: TrialLog, cut: int) -> None:
    for number in range(3):
        log.append(trial(number, MEASURED, 80.0))
    whole = log.path.read_bytes().rstrip()
    log.path.write_bytes(whole[:-cut])
    assert [t.knobs["unroll"] for t in log.read()] == [0, 1]
    log.append(trial(7))
    assert [t.knobs["unroll"] for t in log.read()] == [0, 1, 7]


@pytest.mark.parametrize(
    "line", ["", "[]", "3", "null", '{"task": "x"}', "\x00\xff", '{"measured": 3}']
)
def test_a_line_of_something_else_is_left_out(log: TrialLog, line: str) -> None:
    log.append(trial(1))
    with log.path.open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    log.append(trial(2))
    assert list(log.read()) == [trial(1), trial(2)]


def test_a_new_session_starts_with_an_empty_log(log: TrialLog, tmp_path: Path) -> None:
    log.start(tmp_path)
    assert list(log.read()) == []
    log.append(trial(1))
    log.start(tmp_path)
    assert list(log.read()) == []


def test_the_records_in_use_when_a_session_starts_are_kept(log: TrialLog, tmp_path: Path) -> None:
    kept, records = log.before / "llvm.jsonl", tmp_path / "llvm.jsonl"
    records.write_text("those before\n")
    log.start(tmp_path)
    records.write_text("those of the session\n")
    assert kept.read_text() == "those before\n"
    records.unlink()
    log.start(tmp_path)
    assert not kept.exists()


def test_the_gain_is_where_it_gains_least() -> None:
    assert trial(1, MEASURED, 50.0, 80.0).gain == pytest.approx(1.25)
    assert trial(1, MEASURED, 50.0, 125.0).gain == pytest.approx(0.8)
    assert trial(1, CRASHED).gain == 0.0


def test_a_task_is_concluded_by_its_last_trial() -> None:
    concluding = {
        o for o in (MEASURED, WRONG, CRASHED, REFUSED, KEPT, NOTHING) if trial(1, o).concludes
    }
    assert concluding == {KEPT, NOTHING}
