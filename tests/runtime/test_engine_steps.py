"""What the engine tells of its steps, and what it learns of their cost before the first request."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel

from xpuc.errors import RequestError
from xpuc.runtime.cost_model import Work
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.phases import JsonLines


def test_every_step_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    model = FakeModel()
    with Engine(model, step_log=JsonLines.open(path)) as engine:
        model.fails_at = {2}
        engine.generate([1] * 20, temperature=0, max_tokens=5)
        engine.generate([2] * 6, n=2, temperature=0, max_tokens=5)
    first, *lines = map(json.loads, path.read_text().splitlines())
    assert first == {"modes": dataclasses.asdict(model.modes)}
    assert [line["n_rows"] for line in lines] == [rows for _, rows, _ in model.calls]
    assert [line["failed"] for line in lines] == [n == 2 for n in range(len(lines))]
    assert [line["n_copies"] for line in lines] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert all(0 < line["model_ns"] < line["total_ns"] for line in lines if not line["failed"])


@pytest.mark.parametrize("n_rows", [1, 12, 1000])
def test_a_warm_up_is_the_first_that_is_known_of_the_cost(n_rows: int) -> None:
    engine = Engine(FakeModel())
    cost = engine.scheduler.chunks.cost
    assert cost.predict(Work(1, 0, 12)) == 0
    engine.warm_up(n_rows)
    n = min(n_rows, engine.model.max_chunk)
    assert cost.n_steps == 1 + (n > 1)
    assert cost.largest_seen() == (1 << n.bit_length() - 1 if n > 1 else 0)
    assert cost.predict(Work(1, 0, n)) > 0
    assert engine.kv.n_used == 0


def test_the_budget_is_the_schedulers() -> None:
    assert Engine(FakeModel()).scheduler.chunks.budget_ms == 150.0
    engine = Engine(FakeModel(), chunk_budget_ms=20.0, policy="lpm", queue_bound=7)
    assert engine.scheduler.chunks.budget_ms == 20.0
    assert engine.scheduler.queue_bound == 7


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [2, 1, 3, 0])])
def test_urgent_requests_are_served_first_by_that_policy(policy: Any, order: list[int]) -> None:
    engine = Engine(FakeModel(max_batch=1), policy=policy)
    requests = [
        engine.add_request([n], priority=priority, n=2, temperature=0, max_tokens=2)
        for n, priority in enumerate((7, 1, 0, 1))
    ]
    ended: list[int] = []
    while engine.has_work:
        ended += [requests.index(e.request) for e in engine.step() if e.result is not None]
    assert ended == [each for each in order for _ in range(2)]


def test_requests_share_k_v_with_their_own_salt_only() -> None:
    engine = Engine(FakeModel())
    hits = []
    for salt in (b"", b"one", b"two", b"one"):
        engine.add_request([*range(20)], salt=salt, n=2, temperature=0, max_tokens=2)
        while engine.has_work:
            engine.step()
        hits.append(engine.kv.counters.hit_tokens)
    assert hits == [0, 0, 0, 16]


def test_generate_and_stream_take_what_add_request_takes() -> None:
    engine = Engine(FakeModel())
    for salt, hits in ((b"", 0), (b"one", 0), (b"one", 16)):
        engine.generate([*range(20)], salt=salt, temperature=0, max_tokens=2)
        assert engine.kv.counters.hit_tokens == hits
    list(engine.stream([*range(20)], salt=b"one", temperature=0, max_tokens=2))
    assert engine.kv.counters.hit_tokens == 32
    engine = Engine(FakeModel(max_batch=1), policy="priority")
    engine.add_request([1], priority=5, temperature=0, max_tokens=2)
    engine.generate([2], priority=4, temperature=0, max_tokens=2)
    list(engine.stream([3], priority=3, temperature=0, max_tokens=2))
    assert engine.scheduler.counters.sums["n_admitted"] == 2, "the first one still waits"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "unknown scheduling policy 'fifo'"),
        ({"chunk_budget_ms": 0}, "chunk_budget_ms is 0"),
        ({"chunk_budget_ms": math.nan}, "chunk_budget_ms is nan"),
        ({"threads": 0}, "threads is 0"),
        ({"ctx": -1}, "ctx is -1"),
        ({"n_sequences": 0}, "n_sequences is 0"),
        ({"n_sequences": 1.5}, "n_sequences is 1.5"),
        ({"queue_bound": 0}, "queue_bound is 0"),
        ({"warm_rows": -1}, "warm_rows is -1"),
    ],
)
def test_refused_before_anything_is_loaded(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        load("no such artifact", **options)  # type: ignore[arg-type]
    assert refused.value.message == message
