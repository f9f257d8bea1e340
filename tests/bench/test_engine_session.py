"""The engine's measurements: what each of them does, on an engine whose steps are counted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel
from fake_subject import fake_subject

from xpuc.bench import engine_session, overhead
from xpuc.bench.engine_session import EngineSession, Sizes
from xpuc.bench.overhead import N_RUNNING, NullServer
from xpuc.bench.reuse import reuse
from xpuc.bench.stall import Stream
from xpuc.bench.subject import Subject
from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine
from xpuc.runtime.sequence import State

approx = pytest.approx
SMALL = Sizes(n_requests=6, rate=1e4, stall_prompt=40, prefix=24)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "_SCHEDULER_STEPS", 5)
    monkeypatch.setattr(engine_session, "_ENGINE_STEPS", 5)


def quiet(*told: Any) -> None:
    """Whoever is told of the progress."""


@pytest.mark.parametrize("arrivals", [False, True])
def test_the_null_server_always_has_64_requests_and_frees_what_ended(arrivals: bool) -> None:
    server = NullServer(300, arrivals=arrivals)
    scheduler, n_before = server.scheduler, server.scheduler.counters.n_steps
    for _ in range(300):
        assert server.step() > 0
        assert len(scheduler.running) + len(scheduler.waiting) == N_RUNNING
    scheduler.kv.check()
    assert scheduler.counters.n_steps == n_before + 300
    sums = scheduler.counters.sums
    assert sums["n_preempted"] == 0
    owned = {block for each in scheduler.running for block in each.blocks[0]}
    assert scheduler.kv.n_used == len(owned), "what has ended still owns blocks"
    if arrivals:
        assert sums["n_admitted"] > N_RUNNING + 50
        assert scheduler.kv.counters.hit_tokens > 0
    else:
        assert sums["n_admitted"] == N_RUNNING
        assert all(each.state is State.RUNNING for each in scheduler.running)


def test_overhead_is_what_a_step_takes_beside_the_model() -> None:
    opened: list[Engine] = []
    greedy, sampled = overhead.of_engine(fake_subject(opened=opened), 20, quiet)
    assert (greedy.what, sampled.what) == ("engine, greedy", "engine, sampled")
    assert greedy.n_running == sampled.n_running == 4
    assert greedy.us.n >= 20
    for each in (greedy, sampled):
        assert each.of_step is not None
        assert 0 < each.of_step < 1
    (engine,) = opened
    assert not engine.has_work
    assert engine.kv.n_used == 0
    calls = engine.model.calls  # type: ignore[attr-defined]
    assert {tail for kind, _, tail in calls if kind == "cols"} == {"greedy", "logits"}


def test_where_requests_never_all_decode_there_is_no_overhead_to_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overhead, "_PATIENCE", 0)
    with pytest.raises(RequestError, match="4 requests of up to 57 tokens never all decode"):
        overhead.of_engine(fake_subject(), 28, quiet)


class RowClock:
    """Of an engine whose steps take 10 ms and another millisecond for each row."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        model = engine.model
        assert isinstance(model, FakeModel)
        run = model.run

        def timed(batch: Any, *, tail: Any) -> Any:
            self.ns += 10_000_000 + 1_000_000 * batch.n_rows
            return run(batch, tail=tail)

        monkeypatch.setattr(model, "run", timed)
        monkeypatch.setattr(engine.scheduler, "_clock", lambda: self.ns)

    def __call__(self) -> float:
        return self.ns / 1e9


def stalled(monkeypatch: pytest.MonkeyPatch, budget_ms: float) -> tuple[Any, Engine]:
    engine = fake_subject(context=800).open(ctx=800, n_sequences=2, chunk_budget_ms=budget_ms)
    clock = RowClock(engine, monkeypatch)
    found = Stream(engine, 97, clock=clock).run(300, quiet)
    assert not engine.has_work
    assert engine.kv.n_used == 0
    return found, engine


def test_a_stream_alone_and_beside_a_prompt_without_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = stalled(monkeypatch, math.inf)
    assert found.budget_ms is None
    assert found.prompt_tokens == 300
    assert (found.alone_ms.p50, found.alone_ms.max) == approx((11, 11))
    assert (found.gap_ms.p50, found.gap_ms.max) == approx((42, 42)), "a chunk of 31 and a row"
    assert found.gap_ms.n == 10
    assert (found.smallest_chunk, found.largest_chunk) == (31, 31)
    assert found.first_token_ms == approx(9 * 42 + 10 + 300 - 9 * 31 + 1)


def test_a_stream_beside_a_prompt_with_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    found, engine = stalled(monkeypatch, 21)
    assert found.budget_ms == 21
    assert found.gap_ms.p50 == approx(21), "ten prompt tokens and a row"
    assert found.n_small == engine.scheduler.counters.sums["n_small"] > 20
    assert found.largest_chunk <= 31


def test_a_stream_that_ends_before_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_subject().open(ctx=96, n_sequences=2, chunk_budget_ms=1)
    stream = Stream(engine, 97, clock=RowClock(engine, monkeypatch))
    with pytest.raises(RequestError, match="the stream was at its end after"):
        stream.run(90, quiet)


@pytest.mark.parametrize("has_store", [True, False])
def test_prefixes_are_found_in_memory_and_after_a_restart(has_store: bool, tmp_path: Path) -> None:
    opened: list[Engine] = []
    found = reuse(fake_subject(opened=opened), 40, tmp_path if has_store else None, 0, quiet)
    assert (found.prefix_tokens, found.prompt_tokens) == (40, 56)
    assert (found.cold.found_tokens, found.cold.stored_tokens) == (0, 0)
    assert (found.shared.found_tokens, found.shared.stored_tokens) == (40, 0)
    assert min(found.cold.ms, found.shared.ms) > 0
    if has_store:
        assert found.stored is not None
        assert (found.stored.found_tokens, found.stored.stored_tokens) == (0, 40)
    else:
        assert found.stored is None
    assert len(opened) == 1 + has_store


def test_a_session_measures_everything_in_each_round() -> None:
    told: list[str] = []
    session = EngineSession(
        fake_subject(), dataclasses.replace(SMALL, with_store=True),
        lambda what, done, total: told.append(what),
    )  # fmt: skip
    report = session.run(2)
    counts = [
        report.overheads, report.loads, report.stored_loads, report.stalls, report.free_stalls,
        report.reuses,
    ]  # fmt: skip
    assert [len(each) for each in counts] == [2] * 6
    assert [each.what for each in report.overheads[0]] == [
        "scheduler, all decode", "scheduler, prompts arrive", "engine, greedy", "engine, sampled",
    ]  # fmt: skip
    assert not report.stopped
    assert told.index("load") < told.index("load with a store") < told.index("load, round 2")
    assert told.index("load with a store, round 2") < told.index("load, round 2"), "in turns"
    assert {each.stored.stored_tokens for each in report.reuses if each.stored} == {24}
    assert report.notes == ["load: requests of up to 96 tokens, not 512: the context has no more"]


def test_what_does_not_fit_is_smaller_or_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_session, "find_spec", lambda name: None)
    sizes = Sizes(n_requests=4, rate=math.inf)
    report = EngineSession(fake_subject(max_batch=1), sizes, quiet).run(2)
    assert len(report.loads) == len(report.reuses) == 2
    assert not report.stalls + report.free_stalls
    assert report.reuses[0].prefix_tokens == 48
    assert report.notes == [
        "load: requests of up to 96 tokens, not 512: the context has no more",
        "stall: not measured: the artifact runs one sequence at a time; "
        "compile it with --max-batch 2 or more",
        "reuse: the prefix has 48 tokens, not 1024: the context holds 96",
        "reuse: nothing from a store: the block store needs the package lmdb",
    ]
    with pytest.raises(RequestError, match="needs the package lmdb"):
        EngineSession(fake_subject(), Sizes(with_store=True), quiet)


def test_only_the_wanted_parts_are_measured() -> None:
    sizes = dataclasses.replace(SMALL, parts=("reuse", "overhead"))
    report = EngineSession(fake_subject(), sizes, quiet).run(1)
    assert len(report.overheads) == len(report.reuses) == 1
    assert not report.loads + report.stalls + report.free_stalls


def test_ctrl_c_keeps_what_is_done() -> None:
    def watch(what: str, done: int, total: int) -> None:
        if what == "stall":
            raise KeyboardInterrupt

    report = EngineSession(fake_subject(), SMALL, watch).run(3)
    assert report.stopped
    assert (len(report.overheads), len(report.loads), len(report.stalls)) == (1, 1, 0)


@pytest.mark.slow
def test_a_real_artifact_is_measured(artifact: Path) -> None:
    sizes = Sizes(n_requests=12, rate=math.inf, with_store=True, stall_prompt=60, prefix=48)
    report = EngineSession(Subject.of(artifact, 2), sizes, quiet).run(1)
    assert report.notes == ["load: requests of up to 128 tokens, not 512: the context has no more"]
    for served in (*report.loads, *report.stored_loads):
        assert sum(served.load.ended.values()) == 12
        assert served.load.ended.keys() <= {"length", "cancelled"}
        assert served.load.n_leaked == 0
    for each in (*report.stalls, *report.free_stalls):
        assert each.gap_ms.n >= 2
        assert each.largest_chunk <= 31
    (found,) = report.reuses
    assert found.stored is not None
    assert (found.shared.found_tokens, found.stored.stored_tokens) == (48, 48)
