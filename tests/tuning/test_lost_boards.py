"""Sessions whose boards go away, for a moment or for good, by themselves or by a kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fake_machine import BEST, FakeBoards, Machine, Tuner, faster, task

from xpuc.tuning.results import Findings
from xpuc.tuning.trials import CRASHED, KEPT


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    return Tuner(tmp_path, monkeypatch)


def concluded(findings: Findings) -> bool:
    return all(any(t.concludes for t in result.trials) for result in findings.results)


@pytest.mark.parametrize("loads", range(1, 14, 2))
def test_a_board_lost_at_a_task_loses_nothing(tuner: Tuner, loads: int) -> None:
    """Two boards measure; of the two that tune, one goes away for good after some loads."""
    machine = Machine(faster)
    boards = FakeBoards(machine, 2, lasts=[10**9, 10**9, loads, 10**9])
    findings = tuner.run(machine, task(16), task(24), task(32), boards=boards)
    assert concluded(findings)
    assert tuner.records() == {f"Q8_0:{size}x64": BEST for size in (16, 24, 32)}
    assert max(Counter(tuner.trials()).values()) == 1
    assert "boards" not in findings.notes


def test_a_board_lost_while_incumbents_are_measured_loses_nothing(tuner: Tuner) -> None:
    machine = Machine(faster)
    boards = FakeBoards(machine, 2, lasts=[0, 1, *[10**9] * 4])
    findings = tuner.run(machine, task(16), task(24), task(32), boards=boards)
    assert concluded(findings)
    assert all(result.baseline for result in findings.results)


def test_a_candidate_that_loses_its_board_twice_has_crashed_it(tuner: Tuner) -> None:
    machine = Machine(faster, crashes=lambda knobs: knobs["near"] == 2)
    boards = FakeBoards(machine)
    findings = tuner.run(machine, task(16), task(24), boards=boards)
    assert concluded(findings)
    assert tuner.records() == {f"Q8_0:{n}x64": {"near": 1, "wide": 1} for n in (16, 24)}
    crashed = [(t.task, t.knobs["near"]) for t in tuner.log.read() if t.outcome == CRASHED]
    # (2, 0) and, once wide knobs are the best, (2, 1).
    assert sorted(crashed) == [(f"linear Q8_0:{n}x64 rows=1", 2) for n in (16, 16, 24, 24)]
    assert boards.connections == 2 + 2 * len(crashed)  # one a pass, and one after each crash


def test_several_candidates_of_a_task_may_crash(tuner: Tuner) -> None:
    machine = Machine(faster, crashes=lambda knobs: knobs["near"] > 0)
    assert concluded(tuner.run(machine, task(16)))
    assert tuner.outcomes().count(CRASHED) >= 2
    assert tuner.records() == {"Q8_0:16x64": {"near": 0, "wide": 1}}


def test_a_kernel_in_use_that_crashes_every_board_is_left_alone(tuner: Tuner) -> None:
    machine = Machine(faster)
    boards = FakeBoards(machine, lasts=[0, 0, 0, *[10**9] * 9])
    findings = tuner.run(machine, task(16), task(24), boards=boards)
    reasons = {r.task.site.weights[0].rows: r.reason for r in findings.results}
    assert reasons == {16: "lost a board 3 times (the connection broke)", 24: KEPT}


def test_without_any_board_the_notes_say_so(tuner: Tuner) -> None:
    machine = Machine(faster)
    findings = tuner.run(machine, task(16), boards=FakeBoards(machine, 2, lasts=[]))
    assert "no board was left" in findings.notes["boards"]
    assert [r.reason for r in findings.results] == ["not reached"]


def test_what_was_done_before_the_last_board_went_is_kept(tuner: Tuner) -> None:
    machine = Machine(faster)
    boards = FakeBoards(machine, lasts=[10**9, 12])  # the first measures both
    findings = tuner.run(machine, task(16), task(24), boards=boards)
    assert "no board was left" in findings.notes["boards"]
    assert [r.reason for r in findings.results] == [KEPT, "not reached"]
    assert len(tuner.records()) == 1
    again = tuner.run(machine, task(16), task(24), resumes=True)
    assert concluded(again)
    assert max(Counter(tuner.trials()).values()) == 1
