"""`xpuc tune`: a tiny model tuned, stopped and resumed, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sites
from cli_runs import SIZES, Outcome, invoke, write_manifest
from fake_machine import small_roofs

from xpuc import tune_db
from xpuc.artifact import read_manifest
from xpuc.cli import tune, tune_gpu
from xpuc.codegen.compile import Options
from xpuc.codegen.target import resolve
from xpuc.runtime import nvidia
from xpuc.schedules import kernel_digest, llvm, tvm_version
from xpuc.tune_db import Measurement, Record
from xpuc.tuning import box, timing
from xpuc.tuning.export import CANDIDATES, Shortlist, Tried
from xpuc.tuning.tasks import Subject, subject
from xpuc.tuning.trials import TrialLog

KERNELS = "linear Q8_0:64x* rows=1"  # the output of attention, and of the feed-forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where sessions measure in a hurry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_BLOCK_S", 0.0005)
        patch.setattr(llvm, "roof_loops", small_roofs)
        yield tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def tuned(folder: Path, checkpoint: Path) -> Any:
    """Six trials of two operations, of which each has more."""
    done = invoke(
        "tune", checkpoint, "--kernel", KERNELS, "--trials", 6, "--db", folder / "db",
        "--threads", 1, "--no-verify", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.json


def log_of(folder: Path) -> TrialLog:
    return TrialLog(folder / "db" / "trials" / "llvm.jsonl")


@pytest.mark.slow
def test_json_says_what_was_measured(tuned: Any, folder: Path, checkpoint: Path) -> None:
    assert tuned["subject"] == str(checkpoint)
    assert tuned["boards"] == ["this machine"]
    names = [task["name"] for task in tuned["tasks"]]
    assert sorted(names) == ["linear Q8_0:64x160 rows=1", "linear Q8_0:64x64 rows=1"]
    assert sum(task["share"] for task in tuned["tasks"]) == pytest.approx(1, abs=1e-3)
    assert sum(task["trials"] for task in tuned["tasks"]) == 6
    assert all(task["baseline"][0]["us"] > 0 for task in tuned["tasks"])
    assert tuned["roofs"]["read_gb_s"] > 0
    assert tuned["speeds"] == []
    assert tuned["notes"]["budget"]
    assert tuned["notes"]["next"] == f"xpuc compile {checkpoint} --db {folder / 'db'}"
    assert sum(not trial.concludes for trial in log_of(folder).read()) == 6


@pytest.mark.slow
def test_the_report_is_where_it_says(tuned: Any, folder: Path) -> None:
    page = Path(tuned["report"])
    assert page == folder / "db" / "tune-report.html"
    text = page.read_text(encoding="utf-8")
    for task in tuned["tasks"]:
        op, shape, _ = task["name"].split()
        assert op in text
        assert shape in text


@pytest.mark.slow
def test_resume_goes_on_to_the_end(tuned: Any, folder: Path, checkpoint: Path) -> None:
    done = invoke(
        "tune", checkpoint, "--kernel", KERNELS, "--db", folder / "db", "--threads", 1,
        "--no-verify", "--resume", "--report", folder / "page.html",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (folder / "page.html").exists()
    trials = list(log_of(folder).read())
    measured = Counter((t.task, t.kernel) for t in trials if not t.concludes)
    assert set(measured.values()) == {1}
    ends = {t.task: t.outcome for t in trials if t.concludes}
    assert set(ends) == {task["name"] for task in tuned["tasks"]}
    kept = sum(outcome == "kept" for outcome in ends.values())
    assert f"{kept} record{'s' * (kept != 1)} for 2 operations in " in done.out
    # Where nothing is faster, what is in use is recorded.
    assert len((folder / "db" / "llvm.jsonl").read_text().splitlines()) == len(ends)
    assert f"report   {folder / 'page.html'}" in done.out


def record_of(task: Any, **knobs: int) -> Record:
    made = task.schedule.knobs(**knobs)
    return Record(
        task.key, task.schedule.name, knobs, kernel_digest(task.schedule, task.site, made),
        tvm_version(), ("avx2",) if "avx2" in task.target.features else (), 2,
        (Measurement(1, 80.0, 0.01, 100.0, "memory", 0.5),), 0.0, "2026-11-30",
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled(folder: Path, checkpoint: Path) -> Outcome:
    """With records for the two operations."""
    tasks = subject(checkpoint, KERNELS, Options()).tasks
    tune_db.save(folder / "records", "llvm", [record_of(t, prefetch_bytes=256) for t in tasks])
    done = invoke(
        "compile", checkpoint, *SIZES, "-o", folder / "m.xpuc", "--db", folder / "records"
    )
    assert done.code == 0, done.err
    return done


@pytest.mark.slow
def test_compile_uses_the_records(compiled: Outcome, folder: Path) -> None:
    operations = read_manifest(folder / "m.xpuc").decisions["operations"]
    tuned = [o for o in operations if o["origin"] == "tuned"]
    assert {(o["op"], o["rows"], o["knobs"]["prefetch_bytes"]) for o in tuned} == {
        ("linear", 1, 256)
    }
    tunable = sum(bool(o["knobs"]) for o in operations)
    line = next(line for line in compiled.out.splitlines() if line.startswith("kernels"))
    assert f"{len(operations)}, {len(tuned)} of {tunable} tunable ones by a tuned record" in line


@pytest.mark.slow
def test_an_artifact_is_tuned_too(compiled: Outcome, folder: Path) -> None:
    """Its operations, and its speed as it should become."""
    done = invoke(
        "tune", folder / "m.xpuc", "--kernel", "linear Q8_0:64x64 rows=1", "--trials", 1,
        "--threads", 1, "--db", folder / "of_artifact", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    (task,) = done.json["tasks"]
    assert task["trials"] == 1
    assert Path(done.json["report"]).exists()
    assert done.json["notes"]["next"].startswith(f"xpuc compile MODEL -o {folder / 'm.xpuc'} --db ")


@pytest.mark.slow
def test_ctrl_c_ends_it_with_all_that_is_done(checkpoint: Path, tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "trials" / "llvm.jsonl")
    session = subprocess.Popen(
        [sys.executable, "-m", "xpuc", "tune", str(checkpoint), "--db", str(tmp_path),
         "--kernel", KERNELS, "--threads", "1", "--json"],  # far more than two trials
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while len(list(log.read())) < 2 and session.poll() is None:
        time.sleep(0.05)
    os.killpg(session.pid, signal.SIGINT)  # as a terminal does: the compilers get it as well
    out, err = session.communicate()
    assert session.returncode == 0, err
    assert err == ""
    told = json.loads(out)
    assert told["notes"]["stopped"] == "stopped before the end: --resume goes on"
    trials = list(log.read())
    assert len(trials) == len(log.path.read_text().splitlines()) >= 2
    assert "measured" in {t.outcome for t in trials} <= {"measured", "kept", "nothing faster"}
    assert Path(told["report"]).exists()


# --- mistakes ---


def refused(*args: object) -> list[str]:
    done = invoke("tune", *args)
    assert done.code == 2, done.err
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 2
    return lines


def artifact(path: Path, *operations: dict[str, Any]) -> Path:
    decisions = {"fusions": {}, "operations": list(operations), "records_ignored": {}}
    return write_manifest(path, decisions=decisions)


LINEAR = sites.linear(1, [("Q8_0", 24, 64)]).facts() | {"schedule": "linear_x8", "uses": {}}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("m.gguf --target rocm", "--target rocm: cannot be tuned for"),
        ("--target llvm", "no MODEL or ARTIFACT"),
        ("--target cuda", "no MODEL"),
        ("m.gguf --replay b.zip", "a MODEL (m.gguf)"),
        ("m.gguf --export b.zip --replay b.zip", "each is a command of its own"),
        ("m.gguf --candidates 3", "--candidates: for a GPU only"),
        ("m.gguf --results r.jsonl", "--results: for a GPU only"),
        ("m.gguf --target cuda --threads 2 --export b.zip", "--threads: not for a GPU"),
        ("m.gguf --target cuda --export b.zip", "m.gguf: not found"),
        ("m.gguf --target cuda --tracker lab:9190", "m.gguf: not found"),
        ("m.gguf --export b.zip --tracker lab:9190", "--tracker: not with --export"),
        ("--import r.jsonl --tracker lab:9190", "--tracker: not with --import"),
        ("--replay b.zip --tracker lab:9190", "b.zip: not found"),
        ("--replay b.zip", "b.zip: not found"),
        ("--import r.jsonl", "r.jsonl: not found"),
    ],
)
def test_what_does_not_go_together(line: str, what: str) -> None:
    error, _ = refused(*shlex.split(line))
    assert what in error


def test_before_and_after_are_compiled_with_the_records_of_then_for_the_cpu_that_was_tuned_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Options] = []
    monkeypatch.setattr(
        "xpuc.codegen.compile.compile_model", lambda path, out, options: made.append(options)
    )
    monkeypatch.setattr("xpuc.tuning.speed.measured", lambda *_: [])
    of = Subject(tmp_path / "m.gguf", resolve("llvm", "x86-64-v3"), (), {})
    kept: Any = SimpleNamespace(notes={}, results=[SimpleNamespace(record="kept")], threads=1)
    chosen = {"tracker": None, "verify": True, "cpu": "x86-64-v3"}
    tune._speeds(of, kept, tmp_path / "db", tmp_path, chosen)
    records = [tmp_path / "db" / "trials" / "before", tmp_path / "db"]
    assert made == [Options(cpu="x86-64-v3", db=folder) for folder in records]


def test_what_comes_next_names_another_cpu_than_this_one(tmp_path: Path) -> None:
    path = tmp_path / "m.xpuc"
    path.mkdir()
    there = Subject(path, resolve("llvm", "x86-64-v2"), (), {})
    assert tune._next(there, tmp_path) == (
        f"xpuc compile MODEL -o {path} --db {tmp_path} --cpu x86-64-v2"
    )
    here = Subject(tmp_path / "a b.gguf", resolve("llvm"), (), {})
    assert tune._next(here, None) == f"xpuc compile '{here.path}'"


def test_the_default_that_help_tells_is_the_shortlists() -> None:
    told = " ".join(invoke("tune", "--help").out.split())
    assert f"besides what is in use. Default: {CANDIDATES}." in told


def test_the_commonest_reason_is_told_whatever_its_numbers() -> None:
    reasons = ("", "spills", "80 registers", "", "96 registers")
    found: Any = Shortlist(None, [Tried({}, refused=reason) for reason in reasons])
    assert tune_gpu._commonest(found) == "80 registers"
    assert tune_gpu._commonest(Shortlist(None, [Tried({})])) == ""


def test_several_architectures_are_tuned_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    error, hint = refused(tmp_path / "m.gguf", "--export", tmp_path / "b.zip",
                          "--target", "cuda -arch=sm_80,sm_90a")  # fmt: skip
    assert "several architectures" in error
    assert "-arch=sm_90a" in hint


def test_candidates_are_made_for_the_gpu_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = box.Card("RTX", "580", "12.1")
    assert tune_gpu._target_for(card, "cuda") == "cuda -arch=sm_120"
    monkeypatch.setattr(box, "own_card", lambda: card)
    (tmp_path / "m.gguf").touch()
    error, hint = refused(tmp_path / "m.gguf", "--target", "cuda -arch=sm_90a")
    assert error.endswith("has code for sm_90a; RTX is of compute capability 12.1")
    assert hint == "hint: give --target 'cuda -arch=sm_120' with the MODEL"


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_DRIVER", "libcuda-that-is-not.so")
    (tmp_path / "m.gguf").touch()
    error, hint = refused(tmp_path / "m.gguf", "--target", "cuda")
    assert error.startswith("error: --target cuda: NVIDIA's driver (")
    assert "--export BUNDLE" in hint
    assert "--tracker HOST:PORT" in hint


def test_other_files_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for text in ("", "{", "[1]", '{"task": "linear"}'):
        path.write_text(text)
        error, _ = refused("--import", path)
        assert error == f"error: {path}: no results of xpuc tune --replay"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error, _ = refused(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in error


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--cpu znver3", "--cpu: {of} is an artifact, which has one"),
        ("--report /dev/null/x", "/dev/null/x: cannot be written (Not a directory)"),
    ],
)
def test_what_an_artifact_and_its_report_cannot_have(
    tmp_path: Path, options: str, what: str
) -> None:
    of = artifact(tmp_path / "m.xpuc", LINEAR)
    error, _ = refused(of, *options.split(), "--db", tmp_path / "db")
    assert error == f"error: {what.format(of=of)}"
    assert not (tmp_path / "db").exists()


def test_a_bundle_takes_no_device_s_place(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    os.mkfifo(tmp_path / "pipe")
    error, _ = refused(tmp_path / "m.gguf", "--export", tmp_path / "pipe", "--db", tmp_path)
    assert error == f"error: {tmp_path / 'pipe'}: is not a regular file"


def test_a_bundle_is_for_a_gpu(tmp_path: Path) -> None:
    of = artifact(tmp_path / "m.xpuc", LINEAR)
    error, hint = refused(of, "--export", tmp_path / "b.zip", "--db", tmp_path / "db")
    assert error == f"error: {of}: is for llvm, and a bundle is for a GPU"
    assert hint == "hint: give its checkpoint"


def test_a_kernel_that_there_is_none_of(tmp_path: Path) -> None:
    of = artifact(tmp_path / "m.xpuc", LINEAR)
    error, hint = refused(of, "--kernel", "conv*", "--db", tmp_path / "db")
    assert error == f"error: --kernel conv*: no operation of {of} with knobs is called so"
    assert "operations with knobs: linear" in hint
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize(
    ("address", "what"), [("nowhere", "not an address"), ("127.0.0.1:1", "answers")]
)
def test_a_tracker_that_is_not_there(tmp_path: Path, address: str, what: str) -> None:
    of = artifact(tmp_path / "m.xpuc", LINEAR)
    (tmp_path / "m.gguf").touch()
    for model in ([of], [tmp_path / "m.gguf", "--target", "cuda"]):
        error, _ = refused(*model, "--tracker", address, "--db", tmp_path / "db")
        assert error.startswith(f"error: --tracker {address}: ")
        assert what in error


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    missing = ("tornado", "matplotlib")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in missing else found(name, *more),
    )
    error, hint = refused(artifact(tmp_path / "m.xpuc", LINEAR))
    assert error == "error: xpuc tune: needs tornado, matplotlib"
    assert hint == "hint: pip install 'xpuc[compile,tune]'"


@pytest.mark.parametrize("line", ["--trials 0", "--minutes 0", "--threads 0", "--target rocm"])
def test_options_out_of_range(tmp_path: Path, line: str) -> None:
    refused(artifact(tmp_path / "m.xpuc", LINEAR), *line.split())
