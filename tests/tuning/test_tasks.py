"""What there is to tune, of a checkpoint and of an artifact."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sites
from cli_runs import write_manifest

from xpuc.artifact import EntryPoint, read_manifest
from xpuc.codegen import compile as compiler
from xpuc.codegen.build import Built
from xpuc.codegen.compile import Options, compile_model
from xpuc.errors import RequestError
from xpuc.schedules import Site
from xpuc.tuning.tasks import Task, subject, task_of

SMALL = Options(ctx=64, max_batch=2, max_chunk=32)


def operation(site: Site, schedule: str = "linear_x8", **uses: int) -> dict[str, Any]:
    """As a manifest says it."""
    return site.facts() | {"schedule": schedule, "uses": uses or {"decode": 1}}


def artifact(path: Path, *operations: dict[str, Any], **changes: Any) -> Path:
    decisions = {"fusions": {}, "operations": list(operations), "records_ignored": {}}
    return write_manifest(path, decisions=decisions, **changes)


DECODE = sites.linear(1, [("Q8_0", 24, 64)])
PREFILL = sites.linear("n", [("Q8_0", 24, 64)])
HEAD = sites.head_argmax(1, ("Q4_0", 40, 64))
NORM = replace(DECODE, op="block_norm", attrs={"eps": 1e-5}, weights=())


def test_the_operations_with_knobs_are_the_tasks(tmp_path: Path) -> None:
    found = subject(
        artifact(
            tmp_path / "m.xpuc",
            operation(DECODE, decode=7),
            operation(replace(DECODE, kv_dtype="float32"), decode_greedy=8),  # is no other kernel
            operation(PREFILL),
            operation(HEAD, "head_argmax_x8"),
            operation(NORM, "block_norm"),  # has no knobs
            operation(DECODE, "another_version_s"),
            max_chunk=256,
            entry_points=(EntryPoint("decode", "decode", 1, "logits"),
                          EntryPoint("prefill", "prefill", 0, "logits")),
        )
    )  # fmt: skip
    assert [task.name for task in found.tasks] == [
        "linear Q8_0:24x64 rows=1",
        "linear Q8_0:24x64 rows=any",
        "head_argmax Q4_0:40x64 rows=1",
    ]
    assert [task.rows for task in found.tasks] == [(1,), (16, 128, 256), (1,)]
    assert found.tasks[0].uses == {"decode": 7, "decode_greedy": 8}
    assert found.entry_rows == {"decode": 1, "prefill": 0}
    assert found.is_artifact
    assert {task.target.cpu for task in found.tasks} == {"znver3"}
    assert all(task.schedule.space(task.site) for task in found.tasks)


def test_numbers_of_rows_are_those_a_chunk_has(tmp_path: Path) -> None:
    found = subject(artifact(tmp_path / "m.xpuc", operation(PREFILL), max_chunk=16))
    assert [task.rows for task in found.tasks] == [(16,)]


def test_operations_of_one_key_are_one_task(tmp_path: Path) -> None:
    found = subject(artifact(tmp_path / "m.xpuc", operation(DECODE), operation(DECODE)))
    assert len(found.tasks) == 1


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head*", ["head_argmax Q4_0:40x64 rows=1"]),
        ("* rows=1", ["linear Q8_0:24x64 rows=1", "head_argmax Q4_0:40x64 rows=1"]),
        ("linear Q8_0:24x64 rows=any", ["linear Q8_0:24x64 rows=any"]),
    ],
)
def test_a_pattern_chooses_by_name(tmp_path: Path, pattern: str, names: list[str]) -> None:
    of = artifact(
        tmp_path / "m.xpuc", operation(DECODE), operation(PREFILL),
        operation(HEAD, "head_argmax_x8"),
    )  # fmt: skip
    assert [task.name for task in subject(of, pattern).tasks] == names


def test_a_pattern_that_nothing_matches_says_what_there_is(tmp_path: Path) -> None:
    of = artifact(tmp_path / "m.xpuc", operation(DECODE), operation(HEAD, "head_argmax_x8"))
    with pytest.raises(RequestError, match="--kernel conv\\*: no operation of") as caught:
        subject(of, "conv*")
    assert caught.value.hint.endswith("operations with knobs: head_argmax, linear")


def test_without_any_knobs_there_is_nothing_to_tune(tmp_path: Path) -> None:
    of = artifact(tmp_path / "m.xpuc", operation(NORM, "block_norm"))
    with pytest.raises(RequestError, match="no operation has knobs to tune"):
        subject(of)


def test_a_task_is_made_again_in_another_process() -> None:
    (name,) = ("linear_x8",)
    here = task_of(PREFILL.facts(), name, "llvm", "x86-64-v3")
    assert here.key == dataclasses.replace(PREFILL.key, cpu="x86-64-v3")
    assert here.schedule.name == name
    assert here.site.facts() == PREFILL.facts()


def comparable(task: Task) -> tuple[Any, ...]:
    return task.name, task.facts["op"], task.site.facts(), task.uses, task.rows, task.schedule.name


@pytest.mark.slow
def test_a_checkpoint_has_the_tasks_of_its_artifact(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(module: Any, target: Any, path: Path, **_: Any) -> Built:
        path.write_bytes(b"a library")
        return Built(path, {"decode": 64})

    monkeypatch.setattr(compiler.build, "build", build)
    checkpoint = tiny_model("llama", weights="Q8_0")
    made = compile_model(checkpoint, out=tmp_path / "m.xpuc", options=SMALL).path
    of_model, of_artifact = subject(checkpoint, options=SMALL), subject(made)
    assert [comparable(t) for t in of_model.tasks] == [comparable(t) for t in of_artifact.tasks]
    assert of_model.entry_rows == of_artifact.entry_rows
    assert not of_model.is_artifact
    tunable = {o["op"] for o in read_manifest(made).decisions["operations"] if o["knobs"]}
    assert {task.key.op for task in of_model.tasks} == tunable
    entries = of_artifact.entry_rows
    assert all(set(task.uses) <= set(entries) for task in of_artifact.tasks)
