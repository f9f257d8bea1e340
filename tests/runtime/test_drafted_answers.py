"""An answer with drafts is the answer without: every token, every log probability, every end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from async_runs import ids_of_stream, run
from fake_model import FakeCodec, FakeModel

from xpuc.runtime.async_engine import AsyncEngine
from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.generation import Timings
from xpuc.runtime.speculation import Speculation

# Few enough that what followed earlier often follows again.
FEW: Mapping[int, float] = {3: 34.0, 8: 30.0}
CALM = {"logit_bias": FEW, "max_tokens": 40}
NO_TIME = Timings(0, 0, 0.0, 0.0, 0.0)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": CALM | {"temperature": 0, "seed": 0},
    "seeded": CALM | {"seed": 5},
    "another seed": CALM | {"seed": 6, "temperature": 2.0, "top_k": 0},
    "log probabilities": CALM | {"seed": 5, "logprobs": 3},
    "greedy log probabilities": CALM | {"temperature": 0, "seed": 0, "logprobs": 2},
    "penalties": CALM | {"seed": 5, "repeat_penalty": 1.3, "frequency_penalty": 0.4},
    "DRY": CALM | {"seed": 5, "dry_multiplier": 4.0, "temperature": 1.5},
    "XTC": CALM | {"seed": 5, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    "a stop string": CALM | {"seed": 5, "stop": ("iiii", "didid")},
    "a stop id": {"logit_bias": FEW | {5: 23.0}, "seed": 5, "stop_ids": (5,), "max_tokens": 60},
    "an end": {"logit_bias": FEW | {0: 22.0}, "seed": 5, "max_tokens": 60},
    "least tokens": {
        "logit_bias": FEW | {0: 27.0}, "temperature": 0, "seed": 0, "min_tokens": 15,
        "max_tokens": 60,
    },
    "no end": CALM | {"logit_bias": FEW | {0: 28.0}, "seed": 5, "ignore_eos": True},
    "to the end of the context": {"logit_bias": FEW, "seed": 5},
    "a regular expression": {"regex": "[di]{5}(did|dii)*[.]", "seed": 5, "max_tokens": 40},
    "several": CALM | {"seed": 5, "n": 3, "logprobs": 1},
}  # fmt: skip


def ask(engine: Engine, **options: Any) -> list[Result]:
    """The answers without their times."""
    found = engine.generate([7, 3, 8, 3, 8, 8, 3], **options)
    answers = [replace(each, others=()) for each in (found, *found.others)]
    engine.kv.check()
    assert engine.kv.n_used == 0
    return answers


def engine_of(draft_max: int, **sizes: Any) -> Engine:
    model = FakeModel(**({"buckets": (1, 2, 4, 8), "max_batch": 8} | sizes))
    return Engine(model, FakeCodec(), speculation=Speculation(draft_max, 1, 3))


def found_of(engine: Engine, text: list[int]) -> list[int]:
    """The blocks that a request for this text would find."""
    pool = engine.kv.groups[0].pool
    return pool.match(pool.chain(text))


def told(answers: list[Result]) -> list[Result]:
    return [replace(each, timings=NO_TIME) for each in answers]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("draft_max", [1, 3, 7])
def test_drafts_change_nothing_but_the_number_of_steps(
    options: dict[str, Any], draft_max: int
) -> None:
    if "regex" in options:
        pytest.importorskip("llguidance")
    plain, drafting = engine_of(0), engine_of(draft_max)
    wanted, found = ask(plain, **options), ask(drafting, **options)
    assert told(found) == told(wanted)
    assert len(wanted[0].ids) > 10, "too short to say anything"
    sums = drafting.scheduler.counters.sums
    n_accepted = sum(each.timings.n_accepted for each in found)
    assert n_accepted == sums["n_accepted"] > 0
    # The end of an answer may come before the end of its last draft.
    assert sum(each.timings.n_drafted for each in found) == sums["n_drafted"] > n_accepted
    if len(found) == 1:
        assert len(drafting.model.calls) == len(plain.model.calls) - n_accepted  # type: ignore[attr-defined]


def test_what_was_accepted_is_found_again_and_what_was_not_is_not() -> None:
    prompt = [7, 3, 8, 3, 8, 8, 3]
    engine = engine_of(7)
    first = ask(engine, **CALM, seed=5)[0]
    assert first.timings.n_drafted > first.timings.n_accepted > 0
    text = [*prompt, *first.ids]
    # All that was computed but the last token, of full blocks.
    assert len(found_of(engine, text)) == (len(text) - 1) // 4
    for cut in range(1, len(text), 3):
        again = engine.generate(text[:cut], temperature=0, max_tokens=1, draft_max=0).ids
        assert again == Engine(FakeModel()).generate(text[:cut], temperature=0, max_tokens=1).ids


def test_an_answer_may_end_anywhere_within_its_drafts() -> None:
    for n in range(1, 16):
        options: dict[str, Any] = {"logit_bias": {3: 60.0}, "temperature": 0, "max_tokens": n}
        engine = engine_of(7)
        (found,) = ask(engine, **options)
        assert found.ids == [3] * n
        text = [7, 3, 8, 3, 8, 8, 3, *found.ids]
        assert len(found_of(engine, text)) == (len(text) - 1) // 4
        stopped = ask(engine_of(7), **(options | {"max_tokens": 30, "stop": "d" * n}))[0]
        assert (stopped.finish_reason, stopped.text, len(stopped.ids)) == ("stop", "", n)


def test_a_request_may_do_without() -> None:
    engine = engine_of(7)
    (found,) = ask(engine, **CALM, seed=5, draft_max=0)
    assert (found.timings.n_drafted, engine.scheduler.counters.sums["n_drafted"]) == (0, 0)


@pytest.mark.parametrize("windows", [(0, 6), (5,)])
def test_a_window_sees_the_same_through_drafts(windows: tuple[int, ...]) -> None:
    for prompt in ([7, 3, 8, 3], [3] * 30):
        results = []
        for draft_max in (0, 7):
            engine = engine_of(draft_max, windows=windows, n_blocks=30)
            results.append(engine.generate(prompt, **CALM, seed=5))
            engine.kv.check()
            assert engine.kv.n_used == 0
        plain, drafted = results
        assert told([drafted]) == told([plain])
        assert drafted.timings.n_accepted > 10


def test_requests_side_by_side_share_the_rows() -> None:
    prompts = [[n, 3, 8, 3] for n in range(3)]
    options: dict[str, Any] = CALM | {"seed": 2}
    wanted = engine_of(0).generate(prompts, **options)
    engine = engine_of(7, n_blocks=40)
    found = engine.generate(prompts, **options)
    assert told(found) == told(wanted)
    assert all(each.timings.n_accepted > 0 for each in found)
    assert max(n for kind, n, _ in engine.model.calls if kind == "cols") == 8  # type: ignore[attr-defined]


def test_a_fault_among_the_drafts_is_the_fault_of_plain_steps() -> None:
    options: dict[str, Any] = {"logit_bias": {3: 64.0, 8: 60.0, 5: 58.5}, "seed": 5}
    results = []
    for draft_max in (0, 7):
        engine = engine_of(draft_max)
        engine.model.nan_tokens = {5}  # type: ignore[attr-defined]
        results += ask(engine, **options, max_tokens=60)
    plain, drafted = told(results)
    assert plain.finish_reason == "error"
    assert len(plain.ids) > 3
    assert drafted == plain


def test_a_fault_among_several_drafted_answers_is_nobody_elses() -> None:
    """Rows of drafts whose request another of its answers has just ended are nobody's result."""
    options: dict[str, Any] = {"logit_bias": {3: 64.0, 8: 60.0}, "max_tokens": 40}
    other = {"prompt": [9, 3, 8, 3], **options, "seed": 3}
    wanted = engine_of(0, n_blocks=99).generate(**other).ids
    n_drafted_for_nobody = 0
    for seed in range(12):
        engine = engine_of(7, n_blocks=99)
        engine.model.nan_tokens = {5}  # type: ignore[attr-defined]
        faulty = options | {"logit_bias": {3: 64.0, 8: 60.0, 5: 58.5}}
        engine.add_request([7, 3, 8, 3, 8, 8, 3], n=2, seed=seed, **faulty)
        request = engine.add_request(**other)
        events = [event for _ in range(99) if engine.has_work for event in engine.step()]
        ended = {(e.request is request, e.index): e.result for e in events if e.result}
        assert ended[True, 0].ids == wanted
        first, second = ended[False, 0], ended[False, 1]
        n_drafted_for_nobody += first.finish_reason == "error" and second.timings.n_drafted > 0
    assert n_drafted_for_nobody > 5


def test_a_step_with_drafts_that_fails_ends_its_requests() -> None:
    engine = engine_of(7)
    (whole,) = ask(engine, **CALM, seed=5, draft_max=0)
    engine = engine_of(7)
    engine.model.fails_at = {9}  # type: ignore[attr-defined]
    (found,) = ask(engine, **CALM, seed=5)
    assert (found.finish_reason, found.error) == ("error", "the step failed: kernel launch failed")
    assert 9 <= len(found.ids) < len(whole.ids)
    assert found.ids == whole.ids[: len(found.ids)]


def test_a_stream_has_a_chunk_a_token() -> None:
    engine = engine_of(7)
    options: dict[str, Any] = CALM | {"seed": 5}
    wanted = engine_of(0).generate([7, 3, 8, 3], **options).ids
    assert [each.id for each in engine.stream([7, 3, 8, 3], **options)] == wanted
    assert engine.scheduler.counters.sums["n_accepted"] > 0

    async def of_another_thread() -> None:
        async with AsyncEngine(lambda: engine_of(7)) as engine:
            assert await ids_of_stream(engine, [7, 3, 8, 3], **options) == wanted

    run(of_another_thread)
