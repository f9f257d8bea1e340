"""A loaded artifact: whose TVM runtime it runs on, its pool, its threads, and files that change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from xpuc.artifact import MANIFEST, RUNTIME
from xpuc.errors import ArtifactError, RequestError
from xpuc.runtime import memory, model
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.kv_pool import in_layer_order
from xpuc.runtime.model import default_threads  # before a fixture of all tests replaces it

PROMPT = [5, 6, 7, 8]


def answer(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).ids


def python(code: str, *args: object, **environment: str) -> list[str]:
    """The lines that a Python process of its own prints: a test's has TVM in it already."""
    prelude = (
        "import os, sys, xpuc\n"
        "def answer(path, **options):\n"
        f"    engine = xpuc.load(path, **options)\n"
        f"    return engine.generate({PROMPT}, max_tokens=6, temperature=0, ignore_eos=True).ids\n"
        "def loaded(name):\n"
        "    maps = open('/proc/self/maps').read().split()\n"
        "    return sorted({word for word in maps if word.endswith(name)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *map(str, args)],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_without_tvm_it_runs_on_the_runtime_it_carries(artifact, tmp_path):
    """An installed tvm of another build is left alone."""
    other = tmp_path / "tvm" / RUNTIME
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another build")
    (tmp_path / "tvm" / "__init__.py").write_text("raise ImportError('not here')\n")
    lines = python(
        "print(answer(sys.argv[1])); print('tvm' in sys.modules, loaded('libtvm_runtime.so'))",
        artifact, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert lines == [str(answer(load(artifact))), f"False ['{artifact / RUNTIME}']"]


@pytest.mark.slow
def test_artifacts_run_on_one_runtime(artifacts):
    lines = python(
        "print(*(answer(path) for path in sys.argv[1:]), sep='\\n')\n"
        "print(len(loaded('libtvm_runtime.so')), len(loaded('model.so')))",
        *artifacts.values(),
    )
    assert lines == [*(str(answer(load(path))) for path in artifacts.values()), "1 3"]


@pytest.mark.slow
def test_tvm_may_come_before_or_after(artifact):
    """A second runtime in a process would end it; `tvm` is in this test's process already."""
    lines = python("print(answer(sys.argv[1]))\nimport tvm\nprint(answer(sys.argv[1]))", artifact)
    assert lines == [str(answer(load(artifact)))] * 2


@pytest.mark.slow
def test_an_artifact_replaced_while_it_is_loaded(artifacts, tmp_path):
    """The old one runs on; the new one is the new one, though both have had one path."""
    path = shutil.copytree(artifacts["llama"], tmp_path / "m.xpuc")
    old = load(path)
    shutil.rmtree(path)
    shutil.copytree(artifacts["qwen2"], path)
    new = load(path)
    assert new.model.manifest.arch == "qwen2"
    assert answer(new) == answer(load(artifacts["qwen2"]))
    assert answer(old) == answer(load(artifacts["llama"]))


@pytest.mark.slow
def test_loading_leaves_nothing_behind(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in artifact.rglob("*")}
    answer(load(artifact))
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in artifact.rglob("*")} == before


@pytest.mark.slow
def test_loading_where_nothing_can_be_written(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert answer(load(artifact)) == answer(load(artifact))


@pytest.mark.slow
def test_a_path_relative_to_the_working_folder(artifact, monkeypatch):
    monkeypatch.chdir(artifact.parent)
    engine = load(artifact.name)
    monkeypatch.chdir("/")
    assert answer(engine) == answer(load(artifact))


@pytest.mark.slow
def test_the_pool_is_what_the_statement_says(artifact):
    loaded = model.load_model(artifact, n_sequences=3, ctx=40)
    pools = in_layer_order(pool.layers for pool in loaded.kv)
    assert loaded.n_blocks == (9,)
    assert [pool.shape[0] for pool in pools] == [9] * len(pools)
    assert sum(pool.nbytes for pool in pools) == loaded.memory.kv_pool
    assert {pool.ctypes.data % 64 for pool in pools} == {0}
    key, value = pools[:2]
    assert key.shape[2:] == value.shape[:1:-1]


@pytest.mark.slow
def test_less_memory_than_the_sequences_want(artifact, monkeypatch):
    fixed = model.load_model(artifact).memory
    block = fixed.kv_pool // fixed.pools[0].n_blocks
    besides = fixed.total - fixed.kv_pool + memory.RESERVE_BYTES
    monkeypatch.setattr(memory, "free_bytes", lambda: besides + 5 * block)
    assert load(artifact, n_sequences=2).model.n_blocks == (5,)  # of 8
    assert len(answer(load(artifact, n_sequences=2))) == 6
    monkeypatch.setattr(memory, "free_bytes", lambda: besides + 3 * block)
    with pytest.raises(ArtifactError, match="K/V for one sequence of 64 tokens"):
        load(artifact)


@pytest.mark.slow
def test_a_context_it_was_not_compiled_for(artifact):
    with pytest.raises(RequestError, match="compiled for 64 tokens of context, 65 asked for"):
        load(artifact, ctx=65)


@pytest.mark.slow
def test_threads_are_those_asked_for(artifact):
    """Each load says anew; TVM keeps the threads it has, but need not use them."""
    code = """
import numpy  # has threads of its own
tasks = lambda: len(os.listdir('/proc/self/task'))
before = tasks()
for threads in (1, 3, 1):
    answer(sys.argv[1], threads=threads)
    print(tasks() - before, os.environ['TVM_NUM_THREADS'])
"""
    assert python(code, artifact, TVM_NUM_THREADS="7") == ["0 1", "2 3", "2 1"]


def test_one_thread_for_each_core(monkeypatch):
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3", 4: "4"}
    monkeypatch.setattr(model, "_first_sibling", siblings.__getitem__)
    for allowed, threads in (({0, 1, 2, 3, 4}, 3), ({0, 2}, 1), ({3, 4}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, c=allowed: c, raising=False)
        assert default_threads() == threads


@pytest.mark.slow
def test_what_a_process_takes_is_within_the_statement(artifact):
    """The peak of a process that runs it, against the statement of what it may take."""
    code = """
engine = xpuc.load(sys.argv[1])
engine.generate([5] * 60, max_tokens=3, ignore_eos=True)
print(engine.model.memory.total)
print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])
"""
    total, peak = map(int, python(code, artifact))
    weights = json.loads((artifact / MANIFEST).read_text())["memory"]["weights"]
    assert weights < peak << 10 < total * 1.1
