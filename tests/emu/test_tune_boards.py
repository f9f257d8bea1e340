"""Tuning for a GPU on the emulated one of a board that TVM's RPC tracker knows."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runs import invoke
from emu import fake_driver
from emu.tune_runs import changed, outcomes, refused, replay
from rpc_lab import Lab

from xpuc.tuning import boards, timing
from xpuc.tuning.box import Card
from xpuc.tuning.remote import RemoteReplay
from xpuc.tuning.trials import Trial, TrialLog

pytestmark = pytest.mark.usefixtures("tuned_on_gpu")


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", weights="Q4_0")


@pytest.fixture(scope="module")
def lab(tuned_on_gpu: None) -> Iterator[Lab]:
    """With a board that has the emulated GPU, timed in a hurry."""
    with pytest.MonkeyPatch.context() as patch, Lab() as started:
        patch.setattr(timing, "_BLOCK_S", 0.0005)
        started.server("cuda")
        started.tracker("cuda", 1).close()
        yield started


def on_a_board(lab: Lab) -> tuple[str, ...]:
    return "--tracker", lab.address


def after_the_first_trial(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """What follows the first trial that is written."""
    append, todo = TrialLog.append, [then]

    def appending(log: TrialLog, trial: Trial) -> None:
        append(log, trial)
        while todo:
            todo.pop()()

    monkeypatch.setattr(TrialLog, "append", appending)


def test_a_model_is_tuned_on_a_board(
    lab: Lab, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, run there, recorded here; for the GPU that is there."""
    (tmp_path / "version").write_text("580.65.06\n")
    monkeypatch.setattr(boards, "DRIVER_VERSION", tmp_path / "version")
    before = fake_driver.launches()
    done = invoke(
        "tune", checkpoint, "--target", "cuda", "--kernel", "linear Q4_0:64x64 rows=1",
        "--candidates", 2, *on_a_board(lab), "--db", tmp_path / "db", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert fake_driver.launches() == before
    assert done.json["export"]["arch"] == "sm_90a"
    assert done.json["replay"]["ended"] == "done"
    assert (done.json["card"], done.json["driver"]) == ("emulated sm_90a", "580.65.06")
    *tried, end = TrialLog(tmp_path / "db" / "trials" / "cuda.jsonl").read()
    assert [t.outcome for t in tried] == ["measured"] * 2
    assert all(t.error < 1e-5 and t.measured[0].us > 0 for t in (*tried, end))
    assert len(done.json["records"]) == (end.outcome == "kept")


def test_a_candidate_that_breaks_two_boards_has_crashed_them(
    lab: Lab, bundle: Path, tmp_path: Path
) -> None:
    def sabotage(facts: dict[str, Any]) -> None:
        del facts["tasks"][1:]
        tensors = facts["tasks"][0]["candidates"][1]["program"]["tensors"]
        tensors[-1]["shape"] = [tensors[-1]["shape"][0], 1]  # the kernel asserts another

    path = changed(bundle, tmp_path / "breaks.zip", sabotage)
    told = replay(path, tmp_path / "r.jsonl", *on_a_board(lab))
    assert told["ended"] == "done"
    assert outcomes(tmp_path / "r.jsonl")[:3] == ["lost", "crashed", "measured"]
    assert [t["outcome"] for t in told["tasks"][0]["trials"]] == ["crashed", "measured"]


def test_a_board_that_goes_away_and_another(
    lab: Lab, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "r.jsonl"

    def goes() -> None:
        monkeypatch.setattr(boards, "_REQUEST_S", 0.1)
        lab.servers[-1].terminate()

    with monkeypatch.context() as patch:
        after_the_first_trial(patch, goes)
        error, hint = refused("--replay", bundle, "--results", results, *on_a_board(lab))
    monkeypatch.undo()
    assert f"cuda at {lab.address}: no board is free" in error
    assert f"rpc_server --tracker {lab.address} --key cuda" in hint
    assert "--resume" in hint
    assert outcomes(results) == ["measured", "lost"]
    lab.server("cuda")
    lab.tracker("cuda", 1).close()
    assert replay(bundle, results, "--resume", *on_a_board(lab))["ended"] == "done"
    trials = [t for t in TrialLog(results).read() if t.outcome == "measured"]
    assert len({(t.task, t.kernel) for t in trials}) == len(trials) == 4


def test_ctrl_c_ends_a_replay_on_a_board_too(
    lab: Lab, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "r.jsonl"

    def ctrl_c() -> None:
        signal.raise_signal(signal.SIGINT)

    def twice() -> None:
        ctrl_c()
        ctrl_c()  # as where a board is silent

    with monkeypatch.context() as patch:
        after_the_first_trial(patch, ctrl_c)
        assert replay(bundle, results, *on_a_board(lab))["ended"] == "stopped"
        after_the_first_trial(patch, twice)
        done = invoke(
            "tune", "--replay", bundle, "--results", results, "--resume", *on_a_board(lab)
        )
        assert done.code == 130
    assert outcomes(results) == ["measured"] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_boards_of_a_key_that_differ(
    lab: Lab, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(boards, "DRIVER_VERSION", version)
    start = RemoteReplay.start

    def started(replay: RemoteReplay, card: Card, *more: Any, **resumes: bool) -> None:
        start(replay, card, *more, **resumes)
        version.write_text("581\n")  # where a session is measured, which is another

    monkeypatch.setattr(RemoteReplay, "start", started)
    version.write_text("580\n")
    error, hint = refused("--replay", bundle, "--results", tmp_path / "r.jsonl", *on_a_board(lab))
    assert "has emulated sm_90a, driver 581; it had emulated sm_90a, driver 580" in error
    assert "a key of their own" in hint


def test_a_board_with_another_gpu(lab: Lab, bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    ampere = ("--target", "cuda -arch=sm_80")
    error, hint = refused(checkpoint, *ampere, *on_a_board(lab), "--db", tmp_path / "db")
    assert "'cuda -arch=sm_80': has code for sm_80; emulated sm_90a is of" in error
    assert "-arch=sm_90a" in hint
    assert not (tmp_path / "db").exists()
    path = changed(bundle, tmp_path / "sm_80.zip", lambda facts: facts.update(arch="sm_80"))
    error, _ = refused("--replay", path, *on_a_board(lab))
    assert f"{path}: has code for sm_80; emulated sm_90a is of" in error
