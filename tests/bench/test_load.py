"""A load on an engine: all ends, nothing leaks, and each time is what a clock of its own says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_subject import fake_subject

from xpuc.bench.load import Load, arrivals_of, pool_sizes
from xpuc.bench.saving import serve
from xpuc.bench.workload import Arrival
from xpuc.runtime.engine import Engine


def no_progress(done: int, total: int) -> None:
    assert done <= total


class Clock:
    """A second a step of the engine; sleeping passes the time."""

    def __init__(self, engine: Engine) -> None:
        self.now, self.slept = 100.0, 0.0
        step = engine.step

        def stepped() -> Any:
            self.now += 1
            return step()

        engine.step = stepped  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


def loaded(arrivals: list[Arrival], **sizes: Any) -> tuple[Load, Clock]:
    engine = fake_subject().open(ctx=sizes.pop("ctx", 64), n_sequences=4, **sizes)
    clock = Clock(engine)
    load = Load(engine, arrivals, clock=clock, sleep=clock.sleep)
    load.run(no_progress)
    return load, clock


def arrival(at_s: float, n_prompt: int, max_tokens: int, cancel: int | None = None) -> Arrival:
    first = int(at_s) + 2 * n_prompt
    return Arrival(at_s, tuple(range(first, first + n_prompt)), max_tokens, cancel)


def test_times_count_from_when_a_request_was_due() -> None:
    load, clock = loaded([arrival(0.0, 4, 5), arrival(0.5, 4, 3), arrival(20.0, 4, 2)])
    first, second, third = load.clients.values()
    assert first.times == [1, 2, 3, 4, 5]
    assert second.times == [2, 3, 4], "it came during the first step"
    assert second.first_token_s == 1.5
    assert second.gaps_s == [1, 1]
    assert third.times == [21, 22]
    assert clock.slept == 15
    result = load.result()
    assert result.first_token_ms.max == 1500
    assert result.token_gap_ms.n == 4 + 2 + 1
    assert (result.token_gap_ms.p50, result.per_token_ms.max) == (1000, 1000)
    assert result.queue_wait_ms.max <= 1500
    assert result.generated_tok_s == pytest.approx(10 / 22)
    assert (result.prompt_tokens, result.generated_tokens) == (12, 10)


def test_who_goes_away_gets_no_more_tokens() -> None:
    load, _ = loaded([arrival(0.0, 4, 30, 3), arrival(0.0, 5, 6)])
    gone, other = load.clients.values()
    assert len(gone.times) == 3
    assert len(other.times) == 6
    assert load.result().ended == {"cancelled": 1, "length": 1}


def test_a_load_on_a_small_pool_ends_and_leaks_nothing(tmp_path: Path) -> None:
    opened: list[Engine] = []
    subject = fake_subject(opened=opened)
    arrivals = arrivals_of(subject, 60, 1e4, 1)
    served = [serve(subject, arrivals, 150, store, no_progress) for store in (None, tmp_path)]
    for each, engine in zip(served, opened, strict=True):
        load = each.load
        assert sum(load.ended.values()) == load.n_requests == 60
        assert load.ended.keys() == {"length", "cancelled"}
        assert load.n_leaked == 0
        assert not engine.has_work
        assert load.n_preempted > 0, "the pool is large enough"
        assert load.n_resumed == engine.scheduler.counters.sums["n_resumed"] > 0
        assert load.pool_blocks == engine.kv.groups[0].pool.n_blocks < load.wanted_blocks
        counters = engine.kv.counters
        assert load.hit_rate == counters.hit_tokens / counters.query_tokens > 0
        assert load.evictions == engine.kv.groups[0].pool.counters.evictions > 0
    assert served[0].saving is None
    saving = served[1].saving
    assert saving is not None
    assert 0 < saving.us.n <= served[1].load.evictions
    assert 0 < saving.of_steps < 1


def test_the_pool_holds_the_longest_request() -> None:
    subject = fake_subject(context=96, max_batch=1)
    arrivals = arrivals_of(subject, 100, 1.0, 3)
    sizes = pool_sizes(subject, arrivals)
    assert sizes["n_sequences"] == 1
    assert max(each.n_tokens for each in arrivals) <= sizes["ctx"] <= 96
