"""`xpuc bench --engine`: its tables, its JSON, and which options go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runs import Outcome, invoke
from fake_subject import fake_subject

from xpuc.bench import engine_session
from xpuc.bench.engine_session import Report, Sizes
from xpuc.bench.quantiles import Quantiles
from xpuc.bench.subject import Subject
from xpuc.cli import bench_engine

SIZES = ("--requests", 5, "--rate", "inf", "--stall-prompt", 40, "--prefix", 24, "-t", 1)


@pytest.fixture
def artifact(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Subject, "of", classmethod(lambda cls, path, threads: fake_subject()))
    monkeypatch.setattr(engine_session, "_SCHEDULER_STEPS", 5)
    monkeypatch.setattr(engine_session, "_ENGINE_STEPS", 5)
    return artifact


def run(artifact: Path, *more: Any) -> Outcome:
    return invoke("bench", artifact, "--engine", *SIZES, *more)


def test_json_has_every_number_of_every_round(artifact: Path) -> None:
    done = run(artifact, "--store", "-r", 2, "--json")
    assert (done.code, done.err) == (0, "")
    facts = done.json
    assert facts.keys() == Report.__dataclass_fields__.keys() | {"threads", "sizes"}
    assert facts["sizes"].keys() == Sizes.__dataclass_fields__.keys() - {"parts"}
    assert facts["sizes"]["rate"] is None
    load = facts["loads"][1]["load"]
    assert load["generated_tok_s"] == load["generated_tokens"] / load["seconds"]
    assert load["queue_wait_ms"].keys() == {"n", "p50", "p90", "p99", "max"}
    assert facts["stored_loads"][0]["saving"]["us"]["n"] > 0
    assert [each["budget_ms"] for each in facts["stalls"] + facts["free_stalls"]] == [
        150, 150, None, None,
    ]  # fmt: skip
    assert facts["reuses"][0]["stored"]["stored_tokens"] == 24


def test_for_people_a_table_of_each(artifact: Path) -> None:
    done = run(artifact, "--store", "-r", 2)
    assert (done.code, done.err) == (0, "")
    heads = [table.splitlines()[0].partition("  ")[0] for table in done.out.split("\n\n")]
    assert heads == [
        "beside the model, us a step",
        "load of 5 requests, inf a second, ms",
        "ms, without and with a block store",
        "gap in a stream, a prompt of 40 tokens, ms",
        "first token of a prompt of 40, ms",
        "load: requests of up to 96 tokens, not 512: the context has no more",
    ]
    assert done.out.count("ended: ") == 2
    assert done.out.count("no block leaked") == 2
    assert done.out.splitlines()[-1] == "medians of 2 rounds, 1 thread"


def test_the_parts_of_the_command_are_those_of_the_session(artifact: Path) -> None:
    assert bench_engine._PARTS == engine_session.PARTS
    done = run(artifact, "--only", "reuse", "--json")
    assert len(done.json["reuses"]) == 1
    assert done.json["overheads"] == done.json["loads"] == done.json["stalls"] == []
    assert run(artifact, "--only", "stall").out.splitlines()[-1] == "medians of 1 round, 1 thread"


def test_a_cell_is_the_median_of_the_rounds_with_the_spread_of_their_p99() -> None:
    rounds = [Quantiles(9, p50, 2 * p50, 3 * p50, 1000 * p50) for p50 in (1.0, 4.0, 2.0)]
    assert bench_engine._cells(rounds) == ["2.0", "4.0", "6.0", "2,000.0", "150 %"]
    assert bench_engine._cells(rounds[:1], 0) == ["1", "2", "3", "1,000", "-"]


def test_ctrl_c_prints_what_is_done_and_ends_with_130(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_session, "stall", interrupted)
    done = run(artifact)
    assert (done.code, done.err) == (130, "interrupted\n")
    assert "load of 5 requests" in done.out
    assert "gap in a stream" not in done.out
    assert done.out.splitlines()[-1].endswith("; stopped before all were done")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--engine", "-p", 8), "--n-prompt is not for --engine"),
        (("--engine", "--vs", "llama.cpp"), "--vs is not for --engine"),
        (("--engine", "--no-graphs"), "--graphs is not for --engine"),
        (("--rate", 3), "--rate needs --engine"),
        (("--store",), "--store needs --engine"),
        (("--engine", "--rate", 0), "--rate: "),
        (("--engine", "--requests", 0), "--requests: "),
        (("--engine", "--chunk-budget-ms", "nan"), "--chunk-budget-ms: "),
        (("--engine", "--rate", "nan"), "--rate: "),
    ],
)
def test_options_that_make_no_sense_are_refused(
    artifact: Path, args: tuple[Any, ...], message: str
) -> None:
    done = invoke("bench", artifact, *args)
    assert done.code == 2
    assert done.err.startswith(f"error: {message}")
    assert len(done.err.splitlines()) == 2
    assert not done.out
