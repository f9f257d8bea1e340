"""A session on a machine whose kernels take the time they are told."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_machine import BEST, Knobs, Machine, Tuner, faster, level, task

from xpuc import tune_db
from xpuc.schedules import kernel_digest, tvm_version
from xpuc.tune_db import Measurement, Record
from xpuc.tuning.session import Budget, Session, Status
from xpuc.tuning.shares import saved
from xpuc.tuning.speed import n_of_other_records
from xpuc.tuning.tasks import Task
from xpuc.tuning.trials import KEPT, MEASURED, NOTHING, REFUSED, WRONG, Trial


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    return Tuner(tmp_path, monkeypatch)


def record_of(where: Task, knobs: dict[str, int]) -> Record:
    kernel = kernel_digest(where.schedule, where.site, where.schedule.knobs(**knobs))
    measured = (Measurement(1, 90.0, 0.0, 100.0, "memory", 0.5),)
    return Record(
        where.key, "fake", knobs, kernel, tvm_version(), ("avx2",), 2, measured, 0.0, "2026-11-30"
    )


def untimed(record: Record) -> Record:
    """A record without what the clock says."""
    return dataclasses.replace(record, date="")


DEFAULTS = {"Q8_0:16x64": {"near": 0, "wide": 0}}  # what was in use, measured


def test_the_best_knobs_become_a_record(tuner: Tuner) -> None:
    where = task(16, rows=(16, 128))
    findings = tuner.run(Machine(faster, error=3e-7), where)
    (result,) = findings.results
    record = result.record
    assert record is not None
    assert result.reason == KEPT
    assert tuner.records() == {"Q8_0:16x64": BEST}
    assert record.kernel == record_of(where, BEST).kernel
    assert (record.error, record.threads, record.tvm) == (3e-7, 2, tvm_version())
    assert record.features == ("avx2", "fma")
    assert [m.rows for m in record.measured] == [16, 128]
    for m in record.measured:
        assert m.default_us / m.us == pytest.approx(1.2 * 1.2, rel=0.01)
        assert m.roof == "memory"
    assert [m.rows for m in result.baseline] == [c.rows for c in result.costs] == [16, 128]
    tried = [(t.knobs["near"], t.knobs["wide"]) for t in tuner.log.read() if not t.concludes]
    assert tried == [(1, 0), (2, 0), (2, 1), (0, 1), (1, 1)]
    assert tuner.outcomes() == [MEASURED] * 5 + [KEPT]
    assert findings.notes == {}


def test_what_takes_most_of_a_step_is_tuned_first(tuner: Tuner) -> None:
    tasks = [task(16, uses=2), task(24, uses=30), task(40, uses=4)]
    findings = tuner.run(Machine(level), *tasks)
    sizes = [result.task.site.weights[0].rows for result in findings.results]
    assert sizes == [24, 40, 16]
    total = 16 * 2 + 24 * 30 + 40 * 4
    assert [result.share for result in findings.results] == pytest.approx(
        [720 / total, 160 / total, 32 / total], rel=0.01
    )
    order = list(dict.fromkeys(name for name, _ in tuner.trials()))
    assert order == [result.task.name for result in findings.results]


def test_a_task_counts_in_the_step_it_matters_most_in(tuner: Tuner) -> None:
    both = dataclasses.replace(task(16), uses={"decode_greedy": 1, "prefill_greedy": 9})
    decode = dataclasses.replace(task(24), uses={"decode_greedy": 10})
    shares = {r.task.key: r.share for r in tuner.run(Machine(level), both, decode).results}
    assert shares[both.key] == pytest.approx(1.0)  # all there is of prefill
    assert shares[decode.key] == pytest.approx(240 / 256, rel=0.01)


def test_when_nothing_is_faster_the_defaults_are_recorded(tuner: Tuner) -> None:
    findings = tuner.run(Machine(level), task(16))
    (result,) = findings.results
    assert (result.record, result.reason) == (None, NOTHING)
    assert tuner.records() == DEFAULTS
    assert tuner.outcomes()[-1] == NOTHING


def test_no_harm_faster_with_some_rows_and_slower_with_others_is_not_kept(tuner: Tuner) -> None:
    def mixed(size: int, knobs: Knobs, rows: int) -> float:
        gain = 0.5 * knobs["near"] * (1 if rows == 16 else -0.1) + 0.05 * knobs["wide"]
        return 1e-5 * size * rows / (1 + gain)

    findings = tuner.run(Machine(mixed), task(16, rows=(16, 128, 512)))
    assert tuner.records() == {"Q8_0:16x64": {"near": 0, "wide": 1}}
    (result,) = findings.results
    assert result.record is not None
    assert all(m.us < m.default_us for m in result.record.measured)


def test_what_is_faster_by_less_than_the_noise_is_not_kept(tuner: Tuner) -> None:
    def hardly(size: int, knobs: Knobs, rows: int) -> float:
        return 1e-3 * size * (1 - 0.001 * knobs["near"])

    tuner.run(Machine(hardly), task(16))
    assert tuner.records() == DEFAULTS


def test_what_is_not_faster_when_it_is_confirmed_is_not_kept(tuner: Tuner) -> None:
    """Candidates are fast for as long as they are tried: 7 turns, and one run before."""
    asked: Counter[str] = Counter()

    def tiring(size: int, knobs: Knobs, rows: int) -> float:
        asked[str(knobs)] += 1
        return 1e-3 if knobs == {"near": 0, "wide": 0} or asked[str(knobs)] > 8 else 5e-4

    (result,) = tuner.run(Machine(tiring), task(16)).results
    assert result.record is None
    assert "not confirmed" in result.reason
    assert tuner.outcomes()[-1] == NOTHING
    assert tuner.records() == DEFAULTS


def test_a_wrong_result_is_logged_and_never_kept(tuner: Tuner) -> None:
    machine = Machine(faster, wrong=lambda knobs: knobs["wide"] == 1)
    (result,) = tuner.run(machine, task(16)).results
    assert tuner.records() == {"Q8_0:16x64": {"near": 2, "wide": 0}}
    wrong = [t for t in tuner.log.read() if t.outcome == WRONG]
    assert wrong
    assert all(t.knobs["wide"] == 1 and not t.measured for t in wrong)
    assert result.reason == KEPT


def test_what_does_not_build_is_logged_with_the_reason(tuner: Tuner) -> None:
    tuner.run(Machine(faster, refused=lambda knobs: knobs["near"] == 2), task(16))
    refused = [t for t in tuner.log.read() if t.outcome == REFUSED]
    assert {(t.knobs["near"], t.detail) for t in refused} == {(2, "no registers left")}
    assert tuner.records() == {"Q8_0:16x64": {"near": 1, "wide": 1}}


def test_a_kernel_that_differs_from_the_reference_is_left_alone(tuner: Tuner) -> None:
    (result,) = tuner.run(Machine(faster, error=0.1), task(16)).results
    assert result.reason.startswith("linear Q8_0:16x64 rows=1: differs from the reference")
    assert tuner.records() == {}


def test_a_default_that_does_not_build_is_left_alone(tuner: Tuner) -> None:
    (result,) = tuner.run(Machine(faster, refused=lambda knobs: True), task(16)).results
    assert "does not build (no registers left)" in result.reason


# --- records that are there before ---


def test_a_record_that_is_the_best_stays(tuner: Tuner) -> None:
    where = task(16)
    path = tune_db.save(tuner.folder, "llvm", [record_of(where, BEST)])
    before = path.read_text()
    (result,) = tuner.run(Machine(faster), where).results
    assert result.reason == NOTHING
    assert path.read_text() == before  # that of the incumbent says more
    assert json.dumps(BEST) not in [knobs for _, knobs in tuner.trials()]  # it is the incumbent


def test_a_record_gives_way_to_a_faster_one(tuner: Tuner) -> None:
    where = task(16)
    tune_db.save(tuner.folder, "llvm", [record_of(where, {"near": 1, "wide": 0})])
    (result,) = tuner.run(Machine(faster), where).results
    assert tuner.records() == {"Q8_0:16x64": BEST}
    assert result.baseline[0].us == pytest.approx(160 / 1.1, rel=0.01)  # of what was in use
    assert result.record is not None
    assert result.record.gain == pytest.approx(1.44, rel=0.01)  # over the defaults


def test_a_record_of_other_sources_is_not_what_candidates_are_compared_with(tuner: Tuner) -> None:
    old = dataclasses.replace(record_of(task(16), BEST), kernel="c0ffee")
    tune_db.save(tuner.folder, "llvm", [old])
    tuner.run(Machine(faster), task(16))
    (line,) = (tuner.folder / "llvm.jsonl").read_text().splitlines()
    assert json.loads(line)["kernel"] == record_of(task(16), BEST).kernel


# --- budgets, stops and resuming ---


def test_no_more_trials_than_the_budget_has(tuner: Tuner) -> None:
    findings = tuner.run(Machine(faster), task(16), task(24), budget=Budget(trials=3))
    assert len(tuner.trials()) == 3
    assert "budget" in findings.notes
    assert [result.reason for result in findings.results] == [KEPT, "not reached"]


def test_no_more_seconds_than_the_budget_has(tuner: Tuner) -> None:
    findings = tuner.run(Machine(faster), task(16), budget=Budget(seconds=0.0))
    assert tuner.trials() == []
    assert "budget" in findings.notes
    assert [result.baseline for result in findings.results] == [()]


def stopping(session: Session, trials: int) -> None:
    """Let it be stopped after so many trials."""

    def watch(status: Status) -> None:
        if status.doing == "tuning" and status.trials >= trials:
            session.stop()

    session.watch = watch


def test_a_session_stopped_anywhere_and_resumed_ends_as_one_that_was_not(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task(16, rows=(16, 128)), task(24)]
    whole = Tuner(tmp_path / "whole", monkeypatch)
    expected = whole.run(Machine(faster), *tasks)
    n_trials = len(whole.trials())
    for at in range(1, n_trials):
        parts = Tuner(tmp_path / f"stopped{at}", monkeypatch)
        first = parts.session(Machine(faster), *tasks)
        stopping(first, at)
        stopped = first.run()
        assert "stopped" in stopped.notes
        assert len(parts.trials()) == at
        kept = parts.records()
        assert kept.items() <= whole.records().items()
        findings = parts.run(Machine(faster), *tasks, resumes=True)
        assert Counter(parts.trials()) == Counter(whole.trials())  # nothing was measured twice
        assert [r.record and untimed(r.record) for r in findings.results] == [
            r.record and untimed(r.record) for r in expected.results
        ]
        assert parts.records() == whole.records()


def test_ctrl_c_waits_for_what_is_measured(tuner: Tuner) -> None:
    ended: list[Status] = []
    pressed = threading.Event()

    def watch(status: Status) -> None:
        if status.doing == "tuning" and not pressed.is_set():
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            ended.append(status)

    findings = tuner.run(Machine(faster), task(16), watch=watch)
    assert "stopped" in findings.notes
    assert ended, "its thread was left to itself"


def test_a_resumed_session_does_not_take_noise_for_a_gain(tuner: Tuner) -> None:
    """What was faster on the median, though not in three turns of four, is no gain later either."""
    asked: Counter[str] = Counter()

    def noisy(size: int, knobs: Knobs, rows: int) -> float:
        asked[str(knobs)] += 1
        if knobs == {"near": 1, "wide": 0}:
            return 1e-3 if asked[str(knobs)] % 2 else 4e-4
        return 1e-3 / (1 + 0.2 * knobs["wide"])

    where = task(16)
    first = tuner.session(Machine(noisy), where)
    stopping(first, 2)
    first.run()
    lucky = next(tuner.log.read())
    assert lucky.gain == pytest.approx(2.5)
    assert not lucky.is_faster
    tuner.run(Machine(noisy), where, resumes=True)
    assert tuner.records() == {"Q8_0:16x64": {"near": 0, "wide": 1}}


def test_what_was_concluded_is_not_tuned_again(tuner: Tuner) -> None:
    first = tuner.run(Machine(faster), task(16))
    before = tuner.log.path.read_text()
    again = tuner.run(Machine(faster), task(16), resumes=True)
    assert tuner.log.path.read_text() == before
    assert [r.reason for r in again.results] == [KEPT]
    assert again.results[0].record == first.results[0].record


def test_before_is_what_was_in_use_when_the_session_began(tuner: Tuner) -> None:
    where = task(16)
    tuner.folder.mkdir(exist_ok=True)
    in_use = record_of(where, {"near": 0, "wide": 1})  # 1.2 times as fast as the defaults
    tune_db.save(tuner.folder, "llvm", [in_use])
    first, again = (tuner.run(Machine(faster), where, resumes=n > 0).results[0] for n in range(2))
    assert tuner.records() == {"Q8_0:16x64": BEST}
    assert tune_db.load("llvm", "x86-64-v3", tuner.log.before).lookup(where.key, "fake") == in_use
    for result in (first, again):
        assert result.kept is not None
        assert result.kept.gain == pytest.approx(1.2, rel=0.01)
        assert saved([result]) == pytest.approx(1 - 1 / 1.2, rel=0.01)
        assert result.baseline[-1].us == pytest.approx(first.baseline[-1].us, rel=0.01)
    assert first.record is not None
    assert first.record.gain == pytest.approx(1.44, rel=0.01), "beside the defaults"


def test_an_artifact_may_use_other_records_than_those_before(tuner: Tuner) -> None:
    where = task(16)
    compiled = dataclasses.replace(where, facts={**where.facts, "knobs": {"near": 0, "wide": 0}})
    (result,) = tuner.run(Machine(level), compiled).results
    db = tune_db.TuneDb()
    assert n_of_other_records([result], db) == 0
    db.add(record_of(where, BEST))
    assert n_of_other_records([result], db) == 1


def test_without_resume_a_session_starts_anew(tuner: Tuner) -> None:
    tuner.run(Machine(level), task(16))
    n_trials = len(tuner.trials())
    tuner.run(Machine(level), task(16))
    assert len(tuner.trials()) == n_trials


def test_trials_of_a_kernel_that_has_changed_since_are_measured_again(tuner: Tuner) -> None:
    tuner.run(Machine(level), task(16))
    before = tuner.trials()
    findings = tuner.run(Machine(level, sources=1), task(16, sources=1), resumes=True)
    assert Counter(tuner.trials()) == Counter(before + before)
    assert [r.reason for r in findings.results] == [NOTHING]
    assert [len(r.trials) for r in findings.results] == [len(before) + 1]


def test_trials_of_other_tasks_stay_in_the_log(tuner: Tuner) -> None:
    tuner.run(Machine(level), task(16))
    before = tuner.log.path.read_text()
    findings = tuner.run(Machine(level), task(24), resumes=True)
    assert tuner.log.path.read_text().startswith(before)
    assert [r.task.site.weights[0].rows for r in findings.results] == [24]


def test_those_who_watch_see_it_go_on(tuner: Tuner) -> None:
    seen: list[Status] = []
    tuner.run(Machine(faster), task(16), task(24), watch=seen.append)
    measuring = [s for s in seen if s.doing == "measuring"]
    tuning = [s for s in seen if s.doing == "tuning"]
    assert [(s.done, s.total) for s in measuring] == [(0, 2), (1, 2)]
    assert [s.trials for s in tuning] == sorted(s.trials for s in tuning)
    assert max(s.best for s in tuning) == pytest.approx(1.44, rel=0.01)
    # One of the two has its record by then: 16 of 40 parts, or 24.
    assert tuning[-1].saved == pytest.approx(0.6 * (1 - 1 / 1.44), rel=0.05)


def test_measurements_discarded_for_drift_are_counted(tuner: Tuner) -> None:
    calls = Counter[str]()

    def slower() -> float:
        calls["all"] += 1
        return 1.0 if calls["all"] < 30 else 2.0  # from the first candidate on

    findings = tuner.run(Machine(faster, slower=slower), task(16))
    assert findings.retried == 2
    assert tuner.records() == {"Q8_0:16x64": BEST}


def test_a_session_without_trials_writes_no_records(tuner: Tuner) -> None:
    session = tuner.session(Machine(level), task(16), budget=Budget(seconds=0.0))
    assert not session.db.records
    assert session.run().records_path == str(tuner.folder / "llvm.jsonl")
    assert not (tuner.folder / "llvm.jsonl").exists()


def test_half_of_the_seconds_are_left_for_the_search(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("xpuc.tuning.session.time.monotonic", lambda: now[0])
    tasks = (task(16), task(24), task(32))
    session = tuner.session(Machine(faster), *tasks, budget=Budget(seconds=1000.0))

    def watch(status: Status) -> None:
        now[0] += 300.0 if status.doing == "measuring" else 0.0

    session.watch = watch
    found = session.run().results
    assert sorted(bool(result.baseline) for result in found) == [False, True, True]
    assert [result.reason for result in found if result.baseline] == [KEPT, KEPT]


def test_what_goes_wrong_in_a_boards_thread_ends_the_session_and_is_told(tuner: Tuner) -> None:
    session = tuner.session(Machine(faster), *[task(rows) for rows in (16, 32)])

    def full(trial: Trial) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "trials/llvm.jsonl")

    session.log.append = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"):
        session.run()
