"""Prefixes found again through the whole engine: fewer rows, the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from fake_model import FakeModel

from xpuc.runtime.engine import Engine

PREFIX = list(range(20, 50))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def engine_of(**sizes: Any) -> tuple[Engine, FakeModel]:
    model = FakeModel(**sizes)
    return Engine(model), model


def alone(prompt: list[int]) -> list[int]:
    return engine_of()[0].generate(prompt, **GREEDY).ids


def rows_of(model: FakeModel) -> int:
    """Rows of prompts since the last time."""
    n = sum(rows for kind, rows, _ in model.calls if kind == "prefill")
    model.calls.clear()
    return n


def test_a_shared_prefix_is_computed_once() -> None:
    engine, model = engine_of()
    assert engine.generate([*PREFIX, 1, 2], **GREEDY).ids == alone([*PREFIX, 1, 2])
    assert rows_of(model) == 32
    assert engine.generate([*PREFIX, 4, 5], **GREEDY).ids == alone([*PREFIX, 4, 5])
    assert rows_of(model) == 4, "28 of 32 tokens are in full blocks of the first"
    counters = engine.kv.counters
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (2, 64, 28)


def test_an_answer_is_found_as_part_of_the_next_prompt() -> None:
    engine, model = engine_of()
    prompt = [*PREFIX, 1]
    prompt += [*engine.generate(prompt, **GREEDY).ids, 9]
    rows_of(model)
    assert engine.generate(prompt, **GREEDY).ids == alone(prompt)
    assert rows_of(model) == 40 - 36


def test_a_cancelled_stream_leaves_its_prefix() -> None:
    engine, model = engine_of()
    stream = engine.stream([*PREFIX, 1], **GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    rows_of(model)
    assert engine.generate([*PREFIX, 2], **GREEDY).ids == alone([*PREFIX, 2])
    assert rows_of(model) == 3


@pytest.mark.parametrize("fault", ["nan", "launch"])
def test_what_failed_is_computed_again(fault: str) -> None:
    engine, model = engine_of()
    if fault == "nan":
        model.nan_tokens = {96}
    else:
        model.fails_at = {1}
    assert engine.generate([*PREFIX, 96], **GREEDY).finish_reason == "error"
    model.nan_tokens, model.fails_at = set(), set()
    rows_of(model)
    assert engine.generate([*PREFIX, 96], **GREEDY).ids == alone([*PREFIX, 96])
    assert rows_of(model) == 31


def test_scoring_neither_finds_nor_leaves_a_prefix() -> None:
    engine, model = engine_of()
    engine.score(PREFIX)
    rows_of(model)
    engine.generate([*PREFIX, 1], **GREEDY)
    assert rows_of(model) == 31
    engine.kv.check()
