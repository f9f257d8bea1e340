"""The engine on a model whose every token hangs on the whole context, read through the batch."""

from __future__ import annotations

from typing import Any

import pytest
from fake_model import FakeCodec, FakeModel, alone, engine_of
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine, Result

PROMPTS = [[5], [1, 2, 3], list(range(10, 45)), [7] * 17, [60, 2] * 11, list(range(90, 60, -1))]
LENGTHS = [20, 33, 9, 40, 1, 25]


def ids_of(results: list[Result]) -> list[list[int]]:
    return [each.ids for each in results]


def run_all(engine: Engine, options: list[dict[str, Any]]) -> list[Result]:
    """All prompts through add_request and step."""
    requests = [
        engine.add_request(prompt, **each) for prompt, each in zip(PROMPTS, options, strict=True)
    ]
    results: dict[int, Result] = {}
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                results[event.request.id] = event.result
    assert engine.kv.n_used == 0
    engine.kv.check()
    return [results[request.id] for request in requests]


GREEDY = [{"temperature": 0, "max_tokens": n} for n in LENGTHS]
SAMPLED = [{"seed": n, "max_tokens": n, "repeat_penalty": 1.2} for n in LENGTHS]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("sizes", "expects"),
    [
        pytest.param({"max_batch": 1}, {"decode", "prefill"}, id="one after the other"),
        pytest.param({"max_chunk": 96}, {"cols", "prefill"}, id="batched"),
        pytest.param({"max_chunk": 5}, {"cols", "prefill"}, id="uneven chunks"),
        pytest.param({"max_chunk": 1}, {"decode", "prefill"}, id="chunks of one row"),
        pytest.param({"buckets": (1,)}, {"prefill"}, id="no bucket but one row"),
        pytest.param({"n_blocks": 17}, {"preempted"}, id="preempted"),
        pytest.param({"n_blocks": 15, "max_chunk": 7}, {"preempted"}, id="preempted, chunks"),
    ],
)
def test_every_way_of_running_gives_the_same_tokens(
    options: list[dict[str, Any]], sizes: dict[str, Any], expects: set[str]
) -> None:
    engine = engine_of(**sizes)
    assert isinstance(engine.model, FakeModel)
    seen: set[str] = set()
    preempt = engine.scheduler._preempt
    engine.scheduler._preempt = lambda each: (seen.add("preempted"), preempt(each))  # type: ignore
    expected = [alone(p, **each).ids for p, each in zip(PROMPTS, options, strict=True)]
    assert [len(each) for each in expected] == LENGTHS
    assert ids_of(run_all(engine, options)) == expected
    seen |= {kind for kind, _, _ in engine.model.calls}
    assert expects <= seen


requests_strategy = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=7
)


@pytest.mark.slow
@given(
    requests_strategy,
    st.integers(10, 40),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([(1,), (1, 2, 4), (3,)]),
    st.sampled_from([2, 4, 16]),
)
@settings(max_examples=50, deadline=None)
def test_any_mix_on_any_engine_gives_the_same_tokens(
    mix: list[tuple[int, int, bool]],
    n_blocks: int,
    max_chunk: int,
    max_batch: int,
    buckets: tuple[int, ...],
    tile_rows: int,
) -> None:
    engine = engine_of(
        n_blocks=n_blocks, max_chunk=max_chunk, max_batch=max_batch, buckets=buckets,
        tile_rows=tile_rows,
    )  # fmt: skip
    expected, requests = {}, []
    for place, (n_prompt, n, is_greedy) in enumerate(mix):
        if n_prompt + n > engine.max_tokens:
            continue
        prompt = [(place * 31 + i) % 97 for i in range(n_prompt)]
        options: dict[str, Any] = {
            "temperature": 0.0 if is_greedy else 1.0,
            "seed": place,
            "max_tokens": n,
        }
        requests.append(engine.add_request(prompt, **options))
        expected[requests[-1].id] = alone(prompt, **options).ids
        if place % 2:
            engine.step()
            expected = {id_: ids for id_, ids in expected.items() if id_ in engine._live}
    while engine.has_work:
        for event in engine.step():
            if event.result is not None and event.request.id in expected:
                assert event.result.ids == expected.pop(event.request.id)
    assert not expected
    assert engine.kv.n_used == 0


def test_only_steps_that_need_logits_ask_for_them() -> None:
    engine = engine_of()
    assert isinstance(engine.model, FakeModel)
    engine.generate([1, 2], temperature=0, max_tokens=5)
    assert {tail for *_, tail in engine.model.calls} == {"greedy"}
    engine.model.calls.clear()
    engine.generate([1, 2], temperature=0, max_tokens=5, logprobs=0)
    assert {tail for *_, tail in engine.model.calls} == {"logits"}
    engine.model.calls.clear()
    engine.generate([1, 2], temperature=0, max_tokens=5, min_tokens=3, stop_ids=(4,))
    assert [tail for *_, tail in engine.model.calls] == ["logits"] * 3 + ["greedy"] * 2


def test_streamed_chunks_add_up_to_the_result() -> None:
    engine = engine_of(FakeCodec())
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = engine.generate([3, 4], **options)
    stop = whole.text[20:24]
    for asked in (options, options | {"stop": stop}):
        result = engine.generate([3, 4], **asked)
        chunks = list(engine.stream([3, 4], **asked))
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [chunk.id for chunk in chunks] == result.ids
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == result.finish_reason


def test_two_streams_and_a_request_share_the_engine() -> None:
    engine = engine_of()
    request = engine.add_request([9, 9], temperature=0, max_tokens=6)
    one = engine.stream([3, 4], temperature=0, max_tokens=12)
    two = engine.stream([5], temperature=0, max_tokens=12)
    got: tuple[list[int | None], list[int | None]] = ([], [])
    for _ in range(12):
        got[0].append(next(one).id)
        got[1].append(next(two).id)
    assert list(got) == [alone(p, temperature=0, max_tokens=12).ids for p in ([3, 4], [5])]
    events = engine.step()
    assert [event.request for event in events] == [request] * 6
    assert events[-1].result is not None
    assert events[-1].result.ids == alone([9, 9], temperature=0, max_tokens=6).ids


def test_closing_a_stream_frees_its_blocks() -> None:
    engine = engine_of()
    stream = engine.stream([3, 4], temperature=0)
    next(stream)
    assert engine.kv.n_used == 1
    stream.close()  # type: ignore[attr-defined]
    assert engine.kv.n_used == 0
    assert not engine.has_work
    assert engine.step() == []


def test_ids_that_the_model_does_not_have_are_refused() -> None:
    for options in ({"logit_bias": {97: 1.0}}, {"stop_ids": (97,)}):
        with pytest.raises(RequestError, match="token 97 at place 0 is not in the vocabulary"):
            engine_of().add_request([1], **options)


def test_prompts_in_every_form() -> None:
    engine = Engine(FakeModel(), FakeCodec(), chat_template="{{ messages[0].content }}")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
    text = engine.generate("abc", **options)
    assert text.prompt_ids == [1, 2, 3]
    assert engine.generate([1, 2, 3], **options).ids == text.ids
    assert engine.generate([{"role": "user", "content": "abc"}], **options).ids == text.ids
    several = engine.generate(["abc", "b"], **options)
    assert ids_of(several) == [text.ids, engine.generate([2], **options).ids]
    chats = [[{"role": "user", "content": each}] for each in ("abc", "b")]
    assert ids_of(engine.generate(chats, **options)) == ids_of(several)
    assert ids_of(engine.generate([[1, 2, 3], [2]], **options)) == ids_of(several)


def test_more_prompts_than_the_queue_holds() -> None:
    engine = Engine(FakeModel(max_batch=2), queue_bound=3)
    prompts = [[n] for n in range(12)]
    results = engine.generate(prompts, temperature=0, max_tokens=3)
    assert ids_of(results) == [alone(p, temperature=0, max_tokens=3).ids for p in prompts]


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    model = FakeModel(max_batch=2)
    engine, run = Engine(model, queue_bound=3), model.run
    model.run = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[n] for n in range(12)], temperature=0, max_tokens=3)
    model.run = run  # type: ignore[method-assign]
    assert not engine.has_work
    assert not engine.scheduler.has_work
    assert engine.kv.n_used == 0
    ids = engine.generate([1], temperature=0, max_tokens=3).ids
    assert ids == alone([1], temperature=0, max_tokens=3).ids
    assert not engine.step()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("abc", {}, "a text prompt needs a tokenizer"),
        ([{"role": "user", "content": "a"}], {}, "a chat needs a tokenizer"),
        ([1], {"stop": "x"}, "a stop string needs a tokenizer"),
        ([], {}, "the prompt is empty"),
        ([1, 97], {}, "the prompt: token 97 at place 1"),
        ([2, 1.5], {}, "the prompt: 1.5 at place 1 is no token id"),
        ({"role": "user", "content": "a"}, {}, "the prompt is of type dict"),
        (None, {}, "the prompt is of type NoneType"),
        ([1] * 96, {}, "the prompt has 96 tokens; the context holds 96"),
        ([[1], [-1]], {}, "the prompt: token -1 at place 0"),
        ([1], {"logit_bias": {97: 1.0}}, "logit_bias: token 97"),
        ([1], {"top_q": 1}, "unknown option 'top_q'"),
        ([1], {"params": {"top_k": 1}}, "params is of type dict"),
        ([1], {"salt": "tenant"}, "salt is 'tenant'"),
        ([1], {"priority": "high"}, "priority is 'high'"),
    ],
)
def test_refusals_come_before_any_work(prompt: Any, options: dict[str, Any], message: str) -> None:
    engine = engine_of()
    with pytest.raises(RequestError) as refused:
        engine.generate(prompt, **options)
    assert message in refused.value.message
    is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list)
    with pytest.raises(RequestError):
        engine.stream(prompt[0] if is_several else prompt, top_q=1)
    assert not engine.has_work
    assert isinstance(engine.model, FakeModel)
    assert not engine.model.calls


def test_a_drawn_seed_is_told_and_repeats_the_result() -> None:
    engine = engine_of()
    drawn = engine.generate([1], max_tokens=20)
    assert engine.generate([1], max_tokens=20, seed=drawn.seed).ids == drawn.ids
    assert engine.generate([1], max_tokens=20, seed=drawn.seed + 1).ids != drawn.ids


def test_dry_takes_its_breakers_from_the_vocabulary() -> None:
    engine = engine_of(FakeCodec())
    options: dict[str, Any] = {"max_tokens": 30, "seed": 2, "dry_multiplier": 50.0}
    params: dict[str, Any] = options | {"dry_allowed_length": 1, "dry_breakers": ("q",)}
    assert engine.generate([3, 4] * 8, **params).ids != engine.generate([3, 4] * 8, seed=2).ids
    (breakers,) = engine._intake._breakers.values()
    assert breakers
    assert all("q" in FakeCodec().pieces([token])[0] for token in breakers)


def test_timings_add_up() -> None:
    result = engine_of().generate([1, 2, 3], temperature=0, max_tokens=10)
    timings = result.timings
    assert (timings.n_prompt, timings.n_generated) == (3, 10)
    assert 0 < timings.prompt_ms <= timings.first_token_ms
    assert timings.tokens_per_s == pytest.approx(9000 / timings.decode_ms)
    assert timings.prompt_tokens_per_s == pytest.approx(3000 / timings.prompt_ms)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_warming_up_leaves_nothing_behind(is_replayed: bool) -> None:
    """Of decode calls that are replayed the first is plain, the second captured: neither is told
    the cost model."""
    engine = engine_of(is_replayed=is_replayed)
    assert isinstance(engine.model, FakeModel)
    engine.warm_up(12)
    asked = [("decode", 1), ("prefill", 12), *[("decode", 1)] * (1 + is_replayed)]
    assert engine.model.calls == [(kind, n, "greedy") for kind, n in asked]
    assert engine.scheduler.chunks.cost.n_steps == 2
    assert engine.kv.n_used == 0
    ids = engine.generate([1, 2, 3], temperature=0, max_tokens=9).ids
    assert ids == alone([1, 2, 3], temperature=0, max_tokens=9).ids
