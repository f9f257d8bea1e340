"""Several answers to one prompt: computed once, then each as if it had been asked for alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_model import FakeCodec, FakeModel

from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine, Event, Request, Result

PROMPT = list(range(20, 37))  # in blocks of four: the last holds one token
SAMPLED: dict[str, Any] = {
    "seed": 11, "max_tokens": 12, "repeat_penalty": 1.3, "dynatemp_range": 0.2,
    "logit_bias": {5: 3.0}, "logprobs": 2,
}  # fmt: skip


def engine_of(**sizes: Any) -> tuple[Engine, FakeModel]:
    model = FakeModel(**sizes)
    return Engine(model, FakeCodec()), model


def facts(result: Result) -> tuple[Any, ...]:
    return result.ids, result.text, result.logprobs, result.finish_reason, result.seed, result.error


def separately(n: int, prompt: list[int], **options: Any) -> list[tuple[Any, ...]]:
    """n requests, each in an engine of its own."""
    seed = options.pop("seed")
    return [
        facts(engine_of(n_blocks=24)[0].generate(prompt, seed=seed + i, **options))
        for i in range(n)
    ]


def run(engine: Engine, n_steps: int | None = None) -> list[Event]:
    """The events of so many steps, or of all there are to make."""
    events: list[Event] = []
    while engine.has_work and n_steps != 0:
        events += engine.step()
        n_steps = None if n_steps is None else n_steps - 1
    return events


def check_nothing_is_left(engine: Engine) -> None:
    assert not engine.has_work
    assert not engine.scheduler.has_work
    assert engine.kv.n_used == 0
    engine.kv.check()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="all at once"),
        pytest.param({"max_batch": 2}, id="some wait"),
        pytest.param({"max_chunk": 5}, id="chunks"),
        pytest.param({"n_blocks": 12, "max_context": 40}, id="preempted"),
        pytest.param({"block_tokens": 17}, id="the prompt fills its block"),
    ],
)
def test_each_is_the_answer_to_a_request_with_its_seed(sizes: dict[str, Any]) -> None:
    engine, _ = engine_of(**sizes)
    result = engine.generate(PROMPT, n=4, **SAMPLED)
    answers = [result, *result.others]
    assert [facts(each) for each in answers] == separately(4, PROMPT, **SAMPLED)
    assert len({tuple(each.ids) for each in answers}) == 4
    check_nothing_is_left(engine)


def test_the_prompt_is_computed_once_and_its_last_block_copied() -> None:
    engine, model = engine_of()
    engine.generate(PROMPT, n=4, temperature=0, max_tokens=6)
    assert [rows for _, rows, _ in model.calls] == [16, 1, *[4] * 5]
    assert engine.kv.groups[0].pool.counters.copies == 3


def test_greedy_answers_are_equal() -> None:
    engine, _ = engine_of()
    result = engine.generate(PROMPT, n=3, temperature=0, max_tokens=9)
    assert [each.ids for each in result.others] == [result.ids] * 2
    assert result.ids == engine_of()[0].generate(PROMPT, temperature=0, max_tokens=9).ids


def test_one_answer_has_no_others_and_a_list_of_prompts_has_those_of_each() -> None:
    engine, _ = engine_of()
    assert engine.generate(PROMPT, **SAMPLED).others == ()
    prompts = [PROMPT, [1, 2], [3]]
    results = engine.generate(prompts, n=2, **SAMPLED)
    for prompt, result in zip(prompts, results, strict=True):
        answers = [facts(each) for each in (result, *result.others)]
        assert answers == separately(2, prompt, **SAMPLED)


def test_a_drawn_seed_counts_up() -> None:
    engine, _ = engine_of()
    result = engine.generate(PROMPT, n=3, max_tokens=5)
    assert [each.seed - result.seed for each in result.others] == [1, 2]


def test_events_say_which_answer_they_are_of() -> None:
    engine, _ = engine_of()
    one = engine.add_request(PROMPT, n=3, **SAMPLED)
    other = engine.add_request([9], temperature=0, max_tokens=4)
    events = run(engine)
    assert other.id == one.id + 3, "each answer has an id of the request's age"
    results = {
        (event.request.id, event.index): event.result
        for event in events
        if event.result is not None
    }
    assert set(results) == {(one.id, 0), (one.id, 1), (one.id, 2), (other.id, 0)}
    expected = separately(3, PROMPT, **SAMPLED)
    for index in range(3):
        mine = [e for e in events if e.request is one and e.index == index]
        assert [event.chunk.id for event in mine] == expected[index][0]
        assert facts(results[one.id, index]) == expected[index]


def test_a_grammar_is_followed_by_each() -> None:
    pytest.importorskip("llguidance")
    engine, _ = engine_of()
    options: dict[str, Any] = {"regex": "[abc]{3,9}", "seed": 3, "temperature": 5.0}
    result = engine.generate(PROMPT, n=3, **options)
    assert [facts(each) for each in (result, *result.others)] == separately(3, PROMPT, **options)
    assert all(set(each.text) <= set("abc") for each in (result, *result.others))


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5])
def test_a_cancel_ends_all(n_steps: int) -> None:
    engine, _ = engine_of(max_batch=2)
    request = engine.add_request(PROMPT, n=3, temperature=0, max_tokens=30)
    run(engine, n_steps)
    engine.cancel(request)
    ends = [event for event in engine.step() if event.result is not None]
    assert [(event.index, event.chunk.finish_reason) for event in ends] == [
        (index, "cancelled") for index in range(3)
    ]
    check_nothing_is_left(engine)


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("failing", [0, 1, 2, 4], ids=lambda n: f"call {n}")
def test_a_failed_step_ends_all_of_the_request_and_no_other(failing: int, max_batch: int) -> None:
    """With a batch of one, two of them wait while the step of the third fails."""
    engine, model = engine_of(max_batch=max_batch)
    model.fails_at = {failing}
    request = engine.add_request(PROMPT, n=3, temperature=0, max_tokens=9)
    events = run(engine, failing)
    engine.add_request([3], temperature=0, max_tokens=9)
    if max_batch > 1:
        events += engine.step()
    events += run(engine)
    results = [event.result for event in events if event.request is request and event.result]
    assert [each.error for each in results] == ["the step failed: kernel launch failed"] * 3
    (other,) = [event.result for event in events if event.request is not request and event.result]
    if max_batch == 1:
        assert other.ids == engine_of()[0].generate([3], temperature=0, max_tokens=9).ids
    check_nothing_is_left(engine)


def test_an_answer_that_cannot_go_on_ends_the_others() -> None:
    engine, model = engine_of()
    options: dict[str, Any] = {"seed": 11, "max_tokens": 20, "ignore_eos": True}
    first, second, third = (each[0] for each in separately(3, PROMPT, **options))
    at = next(i for i in range(19) if second[i] not in {*first, *third, *second[:i], *PROMPT})
    model.nan_tokens = {second[at]}
    result = engine.generate(PROMPT, n=3, **options)
    answers = [result, *result.others]
    assert {each.finish_reason for each in answers} == {"error"}
    (message,) = {each.error for each in answers}
    assert message is not None
    assert message.startswith(f"the logits after {len(PROMPT) + at + 1} tokens are unfit")
    # Of that step the one before it in the batch has its token, the one after it has none.
    assert [len(each.ids) for each in answers] == [at + 2, at + 1, at + 1]
    check_nothing_is_left(engine)


def test_a_prompt_without_numbers_ends_all_before_they_begin() -> None:
    engine, model = engine_of()
    model.nan_tokens = {96}
    result = engine.generate([3, 96], n=3, seed=1, logit_bias={96: -math.inf})
    assert [(each.ids, each.finish_reason) for each in (result, *result.others)] == [
        ([], "error")
    ] * 3
    check_nothing_is_left(engine)


def test_refusals() -> None:
    engine = Engine(FakeModel(), queue_bound=5)
    with pytest.raises(RequestError, match="a stream is of one answer, n is 2"):
        engine.stream([1], n=2)
    with pytest.raises(RequestError, match="n is 6; at most 5 can wait"):
        engine.generate([1], n=6)
    assert not engine.has_work


def test_a_request_is_found_by_itself_while_others_come_and_go() -> None:
    engine, _ = engine_of(max_batch=4)
    requests: list[Request] = []
    for n in (3, 1, 2):
        requests.append(engine.add_request([n, n], n=n, temperature=0, max_tokens=6 * n))
        engine.step()
    engine.cancel(requests[1])
    ended = {
        (requests.index(event.request), event.index): event.chunk.finish_reason
        for event in run(engine)
        if event.result is not None
    }
    whole = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    assert ended == {(1, 0): "cancelled"} | dict.fromkeys(whole, "length")
    check_nothing_is_left(engine)
