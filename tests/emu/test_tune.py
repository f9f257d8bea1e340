"""Tuning for a GPU on the emulated one: a bundle made, measured by the runtime alone, recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import invoke
from emu.tune_runs import changed, outcomes, refused, replay

from xpuc.codegen.compile import Options, operations
from xpuc.schedules import cuda
from xpuc.tuning.trials import TrialLog

pytestmark = pytest.mark.usefixtures("tuned_on_gpu")


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", weights="Q4_0")


@pytest.fixture(scope="module")
def results(bundle: Path, tuned_on_gpu: None) -> Path:
    """Of every candidate of the bundle."""
    path = bundle.parent / "tiny.jsonl"
    told = replay(bundle, path)
    assert (told["ended"], told["card"]) == ("done", "emulated sm_90a")
    return path


def test_every_candidate_is_checked_and_timed(results: Path, bundle: Path) -> None:
    trials = list(TrialLog(results).read())
    assert [t.concludes for t in trials] == [False, False, True] * 2
    assert {t.outcome for t in trials if not t.concludes} == {"measured"}
    for trial in trials:
        assert trial.error < 1e-5
        assert all(m.us > 0 and m.default_us > 0 for m in trial.measured)
    before = results.read_text()
    assert replay(bundle, results, "--resume")["ended"] == "done"
    assert results.read_text() == before


def kept(results: Path, to: Path) -> Path:
    """Results in which the first candidate of each task was twice as fast."""
    header, *lines = results.read_text().splitlines()
    first = {t["task"]: t for t in reversed([json.loads(line) for line in lines])}
    made = []
    for trial in first.values():
        measured = [m | {"us": m["default_us"] / 2} for m in trial["measured"]]
        times = {"measured": measured, "beside_defaults": measured}
        made.append(json.dumps(trial | {"outcome": "kept"} | times))
    to.write_text("\n".join([header, *made, ""]))
    return to


def test_what_is_faster_is_recorded_and_compiled(
    results: Path, checkpoint: Path, tmp_path: Path
) -> None:
    done = invoke("tune", "--import", kept(results, tmp_path / "kept.jsonl"),
                  "--db", tmp_path / "db", "--json")  # fmt: skip
    assert done.code == 0, done.err
    assert len(done.json["records"]) == 2
    (line, _) = (tmp_path / "db" / "cuda.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["key"]["cpu"] == "sm_90a"
    assert record["card"] == "emulated sm_90a"
    assert record["driver"]
    for target in ("cuda -arch=sm_90a", "cuda"):
        found, _ = operations(checkpoint, Options(target=target, db=tmp_path / "db"))
        tuned = [o for o in found if o["origin"] == "tuned"]
        assert {(o["op"], o["rows"]) for o in tuned} == {("linear", 1)}
        assert record["knobs"] in [o["knobs"] for o in tuned]


def test_results_of_other_kernels_make_no_record(results: Path, tmp_path: Path) -> None:
    path = kept(results, tmp_path / "kept.jsonl")
    header, *lines = path.read_text().splitlines()
    changed = [json.dumps(json.loads(line) | {"kernel": "0" * 16}) for line in lines]
    path.write_text("\n".join([header, *changed, ""]))
    done = invoke("tune", "--import", path, "--db", tmp_path / "db", "--json")
    assert done.json["records"] == []
    assert done.json["left_out"] == {"measured on another version of the kernel": 2}
    assert not (tmp_path / "db").exists()


def test_a_candidate_with_another_result_is_refused(bundle: Path, tmp_path: Path) -> None:
    def sabotage(facts: dict[str, Any]) -> None:
        program = facts["tasks"][0]["candidates"][1]["program"]
        args = program["calls"][0]["args"]
        args[1], args[2] = args[2], args[1]  # scales of the activation, and sums
        del facts["tasks"][1:]

    path = changed(bundle, tmp_path / "wrong.zip", sabotage)
    told = replay(path, tmp_path / "r.jsonl")
    assert told["ended"] == "done"
    assert outcomes(tmp_path / "r.jsonl")[:2] == ["wrong", "measured"]
    assert told["tasks"][0]["trials"][0]["outcome"] == "wrong"


def test_attention_is_measured_with_a_context(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [
        replace(s, space=lambda _: {"ahead": (1, 2)}) if s.name == "attention_decode" else s
        for s in cuda.SCHEDULES
    ]
    monkeypatch.setattr(cuda, "SCHEDULES", tuple(few))
    path = tmp_path / "attention.zip"
    done = invoke(
        "tune", checkpoint, "--target", "cuda -arch=sm_90a", "--kernel", "attention * rows=1",
        "--export", path, "--db", tmp_path / "none", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    (task,) = done.json["tasks"]
    assert task["kept"] == [{"warps": 4, "splits": 1, "ahead": n} for n in (1, 2)]
    replay(path, tmp_path / "r.jsonl")
    first, *_ = TrialLog(tmp_path / "r.jsonl").read()
    assert (first.outcome, first.knobs["ahead"]) == ("measured", 2)
    assert first.error < 1e-5


def test_a_task_of_which_what_is_in_use_is_wrong_is_left_alone(
    bundle: Path, tmp_path: Path
) -> None:
    def sabotage(facts: dict[str, Any]) -> None:
        args = facts["tasks"][0]["candidates"][0]["program"]["calls"][0]["args"]
        args[1], args[2] = args[2], args[1]

    told = replay(changed(bundle, tmp_path / "wrong.zip", sabotage), tmp_path / "r.jsonl")
    first, *others = TrialLog(tmp_path / "r.jsonl").read()
    assert first.outcome == "wrong"
    assert "differs from the reference" in first.detail
    assert {t.task for t in others} == {told["tasks"][1]["name"]}
    assert others[-1].concludes


def test_a_candidate_that_breaks_the_gpu_ends_its_process_and_no_other(
    bundle: Path, tmp_path: Path
) -> None:
    def sabotage(facts: dict[str, Any]) -> None:
        del facts["tasks"][1:]
        program = facts["tasks"][0]["candidates"][1]["program"]
        program["calls"][0]["function"] = "nothing_is_called_so"

    path = changed(bundle, tmp_path / "breaks.zip", sabotage)
    assert replay(path, tmp_path / "r.jsonl")["ended"] == "done"
    assert outcomes(tmp_path / "r.jsonl")[:2] == ["crashed", "measured"]


def test_ctrl_c_ends_it_with_what_is_done_and_resume_goes_on(bundle: Path, tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "xpuc", "tune", "--replay", bundle, "--results", results, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and len(children.read_text().split()) < 2:
        time.sleep(0.001)  # until the process that measures starts, after that of multiprocessing
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["ended"] == "stopped"
    assert len(outcomes(results)) < 6
    assert replay(bundle, results, "--resume")["ended"] == "done"
    assert len(outcomes(results)) == 6


def test_it_runs_without_the_compiler(bundle: Path) -> None:
    """What a box has: xpuc's core, no tvm."""
    code = (
        "import sys; from xpuc.tuning import replay; from xpuc.cli import tune, tune_gpu;"
        "print([m for m in sys.modules if m == 'tvm' or m.startswith(('xpuc.schedules',"
        " 'xpuc.codegen', 'xpuc.passes'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


# --- what does not fit ---


def test_a_damaged_bundle(bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    for name, broken in (
        ("short", data[: len(data) // 2]),
        ("other", b"GGUF" * 100),
        ("flipped", data[:9000] + bytes(64) + data[9064:]),
    ):
        path = tmp_path / f"{name}.zip"
        path.write_bytes(broken)
        error, hint = refused("--replay", path)
        assert str(path) in error
        assert "--export" in hint


def test_a_bundle_for_another_gpu(bundle: Path, tmp_path: Path) -> None:
    path = changed(bundle, tmp_path / "sm_80.zip", lambda facts: facts.update(arch="sm_80"))
    error, hint = refused("--replay", path)
    assert "has code for sm_80; emulated sm_90a is of compute capability 9.0" in error
    assert "-arch=sm_90a" in hint


def test_a_bundle_of_another_tvm(bundle: Path, results: Path, tmp_path: Path) -> None:
    path = changed(bundle, tmp_path / "ffi.zip", lambda facts: facts.update(tvm_ffi="0.9.0"))
    error, hint = refused("--replay", path)
    assert "made with apache-tvm-ffi 0.9.0" in error
    assert "pip install" in hint
    header, *lines = results.read_text().splitlines()
    other = tmp_path / "tvm.jsonl"
    other.write_text("\n".join([json.dumps(json.loads(header) | {"tvm": "0.1.0"}), *lines, ""]))
    error, _ = refused("--import", other)
    assert "measured with tvm 0.1.0" in error


def test_results_of_another_bundle_are_not_gone_on_with(
    bundle: Path, results: Path, tmp_path: Path
) -> None:
    path = changed(bundle, tmp_path / "other.zip", lambda facts: facts.update(xpuc="9"))
    copied = shutil.copy(results, tmp_path / "r.jsonl")
    error, hint = refused("--replay", path, "--results", copied, "--resume")
    assert "is of another bundle or card" in error
    assert "--results" in hint
