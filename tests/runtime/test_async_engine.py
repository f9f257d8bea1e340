"""The asynchronous engine gives what the engine does, to callers in any task, loop or thread."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from async_runs import (
    GREEDY,
    TIMEOUT_S,
    GatedModel,
    Recorded,
    ids_of_stream,
    n_used,
    run,
)
from fake_model import FakeCodec, FakeModel, engine_of

import xpuc
from xpuc.errors import RequestError, XpucError
from xpuc.runtime.async_engine import AsyncEngine
from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.runtime.sequence import Request


def plain(result: Result) -> tuple[Any, ...]:
    """What of a result does not hang on time."""
    return (result.prompt_ids, result.ids, result.text, result.finish_reason, result.seed)


def test_fifty_at_once_get_what_the_engine_gives() -> None:
    prompts = [[1 + i % 90] * (1 + i % 7) for i in range(50)]
    options: list[dict[str, Any]] = [
        {"max_tokens": 3 + i % 11, "seed": i} | (GREEDY if i % 2 else {}) for i in range(50)
    ]
    expected = [
        plain(engine_of(FakeCodec()).generate(prompt, **each))
        for prompt, each in zip(prompts, options, strict=True)
    ]

    async def test() -> None:
        async with AsyncEngine(partial(engine_of, FakeCodec())) as engine:
            asked = list(zip(prompts, options, strict=True))
            generated = asyncio.gather(*(engine.generate(p, **each) for p, each in asked))
            streamed = asyncio.gather(*(ids_of_stream(engine, p, **each) for p, each in asked))
            assert [plain(each) for each in await generated] == expected
            assert await streamed == [each[1] for each in expected]
            assert await n_used(engine) == 0

    run(test)


def test_a_stream_is_the_engine_s_chunk_by_chunk() -> None:
    options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "logprobs": 2}

    async def test() -> None:
        async with AsyncEngine(partial(engine_of, FakeCodec())) as engine:
            chunks = [chunk async for chunk in engine.stream("abc", **options)]
        assert chunks == list(engine_of(FakeCodec()).stream("abc", **options))
        assert chunks[-1].finish_reason is not None

    run(test)


def test_lists_chats_params_and_completions() -> None:
    def chatty() -> Engine:
        return Engine(FakeModel(), FakeCodec(), chat_template="{{ messages[0].content }}")

    chat = [{"role": "user", "content": "abc"}]
    asked: list[tuple[Any, dict[str, Any]]] = [
        ("abc", {}),
        (["abc", "b"], {}),
        (["abc"], {}),
        (chat, {}),
        ([chat, chat], {}),
        ("abc", {"params": SamplingParams(seed=5, n=3)}),
        (["abc", [4, 5]], {"n": 2, "seed": 9}),
    ]

    async def test() -> None:
        async with AsyncEngine(chatty) as engine:
            for prompt, options in asked:
                options = {"max_tokens": 6, "seed": 1} | options
                expected = chatty().generate(prompt, **options)
                got = await engine.generate(prompt, **options)
                if isinstance(expected, Result):
                    expected, got = [expected], [got]  # type: ignore[list-item]
                assert isinstance(got, list)
                for one, other in zip(got, expected, strict=True):
                    assert plain(one) == plain(other)
                    assert list(map(plain, one.others)) == list(map(plain, other.others))

    run(test)


def test_options_of_a_request_reach_it() -> None:
    requests: list[Request] = []

    class Noting(Engine):
        def add_request(self, *args: Any, **options: Any) -> Request:
            requests.append(super().add_request(*args, **options))
            return requests[-1]

    async def test() -> None:
        async with AsyncEngine(lambda: Noting(FakeModel())) as engine:
            await engine.generate([1], max_tokens=2, priority=3, salt=b"mine")
            await ids_of_stream(engine, [1], max_tokens=2, priority=3, salt=b"mine")

    run(test)
    for request in requests:
        assert (request.priority, request.salt, request.params.max_tokens) == (3, b"mine", 2)
    assert len(requests) == 2


def test_a_stream_is_of_one_answer() -> None:
    async def test() -> None:
        async with AsyncEngine(engine_of) as engine:
            for options in ({"n": 2}, {"params": SamplingParams(n=2)}):
                with pytest.raises(RequestError, match="a stream is of one answer, n is 2"):
                    await ids_of_stream(engine, [1], **options)

    run(test)


def test_a_list_waits_for_room_in_the_queue_and_one_prompt_is_refused() -> None:
    model = GatedModel(max_batch=1)
    prompts = [[n] for n in range(1, 12)]
    options = GREEDY | {"max_tokens": 3, "seed": 1}

    async def test() -> None:
        async with AsyncEngine(lambda: Engine(model, queue_bound=3)) as engine:
            several = asyncio.create_task(engine.generate(prompts, **options))
            await asyncio.sleep(0)
            singles = asyncio.gather(
                *(engine.generate([1], **options) for _ in range(5)), return_exceptions=True
            )
            await asyncio.sleep(0)
            model.open()
            refused = [each for each in await singles if isinstance(each, RequestError)]
            assert len(refused) >= 4, "at most one found room, while the list waited"
            assert all("server busy" in str(each) for each in refused)
            expected = [engine_of().generate(prompt, **options) for prompt in prompts]
            assert list(map(plain, await several)) == list(map(plain, expected))
            assert await n_used(engine) == 0

    run(test)


class Unreadable:
    """A prompt that fails in a way of its own."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> int:
        raise TypeError("no items")


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([1], {"top_q": 1}, RequestError, "unknown option 'top_q'"),
        ("abc", {}, RequestError, "a text prompt needs a tokenizer"),
        ([], {}, RequestError, "the prompt is empty"),
        ([[1], [2], [-1]], {}, RequestError, "token -1 at place 0"),
        ([1] * 96, {}, RequestError, "the prompt has 96 tokens"),
        ([[1], 5], {}, RequestError, "the prompt is of type int"),
        ([[1], Unreadable()], {}, TypeError, "no items"),
    ],
)
def test_refusals_are_raised_in_the_caller_and_nothing_runs(
    prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = FakeModel()

    async def test() -> None:
        async with AsyncEngine(lambda: Engine(model)) as engine:
            with pytest.raises(error, match=message):
                await engine.generate(prompt, **options)
            if error is RequestError:
                with pytest.raises(RequestError):
                    await ids_of_stream(engine, prompt, **options)
            assert await n_used(engine) == 0
            assert not model.calls
            assert len((await engine.generate([1], max_tokens=2)).ids) == 2

    run(test)


def test_a_refusal_later_in_a_long_list_ends_the_rest() -> None:
    async def test() -> None:
        async with AsyncEngine(lambda: Engine(FakeModel(max_batch=1), queue_bound=2)) as engine:
            with pytest.raises(RequestError, match="token -1 at place 0"):
                await engine.generate([[1], [2], [3], [-1], [5]], max_tokens=4)
            assert await n_used(engine) == 0
            assert not await engine.call(lambda inner: inner.has_work)

    run(test)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing() -> None:
    async def test() -> None:
        async with AsyncEngine(engine_of) as engine:
            slow = engine.stream([3, 4], max_tokens=30, **GREEDY)
            ids = [(await anext(slow)).id]
            for n in range(5):
                assert len((await engine.generate([n + 1], max_tokens=20, **GREEDY)).ids) == 20
            ids += [chunk.id async for chunk in slow]
            assert ids == engine_of().generate([3, 4], max_tokens=30, **GREEDY).ids

    run(test)


def test_loops_of_several_threads_share_it() -> None:
    options = GREEDY | {"max_tokens": 10}
    expected = [engine_of().generate([n], **options).ids for n in range(1, 25)]
    engine = AsyncEngine(engine_of)
    got: dict[int, list[Any]] = {}

    async def of_thread(first: int) -> None:
        prompts = [[n] for n in range(first, first + 6)]
        results, streamed = await asyncio.gather(
            engine.generate(prompts[:3], **options),
            asyncio.gather(*(ids_of_stream(engine, each, **options) for each in prompts[3:])),
        )
        got[first] = [*(each.ids for each in results), *streamed]

    threads = [
        threading.Thread(target=run, args=[partial(of_thread, first)]) for first in range(1, 25, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [ids for first in sorted(got) for ids in got[first]] == expected
    run(engine.close)


def test_an_idle_engine_takes_no_time() -> None:
    async def test() -> None:
        async with AsyncEngine(lambda: Recorded(FakeModel())) as engine:
            await engine.generate([1], max_tokens=3)

            def taken(inner: Engine) -> tuple[int, float]:
                assert isinstance(inner, Recorded)
                return inner.n_steps, time.thread_time()

            n_steps, seconds = await engine.call(taken)
            await asyncio.sleep(0.2)
            later_steps, later_seconds = await engine.call(taken)
            assert later_steps == n_steps
            assert later_seconds - seconds < 0.01

    run(test)


def test_call_gives_and_raises() -> None:
    async def test() -> None:
        async with AsyncEngine(engine_of) as engine:
            scored = await engine.call(lambda inner: inner.score([1, 2, 3]))
            assert scored == engine_of().score([1, 2, 3])
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda inner: 1 // 0)
            assert await engine.call(lambda inner: inner.max_tokens) == 96

    run(test)


def test_it_is_at_the_front_door(tmp_path: Path) -> None:
    assert xpuc.AsyncEngine is AsyncEngine

    async def test() -> None:
        with pytest.raises(XpucError) as by_load:
            xpuc.load(tmp_path / "none.xpuc")
        with pytest.raises(type(by_load.value), match=re.escape(by_load.value.message)):
            async with xpuc.AsyncEngine.load(tmp_path / "none.xpuc", threads=1):
                pytest.fail("there is none")

    run(test)


@pytest.mark.slow
def test_on_an_artifact(artifact: Path, tmp_path: Path) -> None:
    options = GREEDY | {"max_tokens": 8, "seed": 1}
    with xpuc.load(artifact) as loaded:
        expected = [plain(loaded.generate(prompt, **options)) for prompt in ([5, 6], [7])]

    async def test() -> None:
        async with xpuc.AsyncEngine.load(artifact, store=tmp_path / "store") as engine:
            both = asyncio.gather(*(engine.generate(each, **options) for each in ([5, 6], [7])))
            assert list(map(plain, await both)) == expected

    run(test)
