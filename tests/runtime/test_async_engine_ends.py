"""What ends a request of the asynchronous engine: its caller, a failure, the end of the engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial
from random import Random
from typing import Any

import pytest
from async_runs import (
    GREEDY,
    GatedModel,
    Recorded,
    ids_of_stream,
    n_used,
    run,
    started,
)
from fake_model import FakeModel, engine_of

from xpuc.errors import ArtifactError, FileError, RequestError
from xpuc.runtime.async_engine import AsyncEngine
from xpuc.runtime.engine import Engine


def test_cancelling_a_task_ends_its_requests() -> None:
    model = GatedModel()

    async def test() -> None:
        async with AsyncEngine(lambda: Engine(model)) as engine:
            other = asyncio.create_task(engine.generate([9, 9], max_tokens=8, **GREEDY))
            task = asyncio.create_task(engine.generate([[1] * 9, [2]], **GREEDY))
            model.gate.release(4)
            await started(lambda: len(model.calls), 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            model.open()
            assert (await other).ids == engine_of().generate([9, 9], max_tokens=8, **GREEDY).ids
            assert await n_used(engine) == 0
            assert not await engine.call(lambda inner: inner.has_work)
        assert len(model.calls) < 20

    run(test)


def test_any_mix_of_cancels_leaves_the_others_alone() -> None:
    random = Random(4)
    asked = [([random.randrange(1, 90)] * random.randrange(1, 9), n % 3) for n in range(30)]
    patience = [random.randrange(30) for _ in asked]
    options = GREEDY | {"max_tokens": 12}

    async def test() -> None:
        async with AsyncEngine(partial(engine_of, n_blocks=20)) as engine:

            async def ask(prompt: list[int], way: int) -> list[int | None]:
                if way == 2:
                    return await ids_of_stream(engine, prompt, **options)
                return list((await engine.generate(prompt, **options)).ids)

            async def give_up(task: asyncio.Task[Any], after: int) -> None:
                for _ in range(after):
                    await asyncio.sleep(0.001)
                task.cancel()

            tasks = [asyncio.create_task(ask(prompt, way)) for prompt, way in asked]
            some = zip(tasks[::2], patience[::2], strict=True)
            await asyncio.gather(*(give_up(task, after) for task, after in some))
            got = await asyncio.gather(*tasks, return_exceptions=True)
            assert await n_used(engine) == 0
            await engine.call(lambda inner: inner.kv.check())
            assert not await engine.call(lambda inner: inner.has_work)
            assert not engine._thread._jobs
        expected = [engine_of().generate(prompt, **options).ids for prompt, _ in asked]
        assert got[1::2] == expected[1::2]
        for one, other in zip(got[::2], expected[::2], strict=True):
            assert isinstance(one, asyncio.CancelledError) or one == other

    run(test)


@pytest.mark.parametrize("how", ["close", "drop", "cancel"])
def test_leaving_a_stream_ends_its_request(how: str) -> None:
    model = GatedModel()

    async def leave(engine: AsyncEngine) -> None:
        stream = engine.stream([3, 4], **GREEDY)
        model.gate.release(2)
        assert (await anext(stream)).finish_reason is None
        assert (await anext(stream)).finish_reason is None
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    async def test() -> None:
        async with AsyncEngine(lambda: Engine(model)) as engine:
            await leave(engine)
            for _ in range(3):  # the loop closes an iterator that nobody holds
                await asyncio.sleep(0)
            model.open()
            assert await n_used(engine) == 0
            assert not await engine.call(lambda inner: inner.has_work)
            assert len(model.calls) <= 4

    run(test)


def test_a_failed_step_fails_its_requests_only() -> None:
    model = FakeModel(max_batch=2)
    model.fails_at = {3}

    async def test() -> None:
        async with AsyncEngine(lambda: Engine(model)) as engine:
            results = await engine.generate([[1], [2], [3]], max_tokens=8, **GREEDY)
            assert [each.finish_reason for each in results] == ["error", "error", "length"]
            assert results[0].error == "the step failed: kernel launch failed"
            chunks = [chunk async for chunk in engine.stream([1], max_tokens=3, **GREEDY)]
            assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
            assert await n_used(engine) == 0

    run(test)


def test_a_failure_of_the_thread_reaches_all_who_wait() -> None:
    class Broken(Recorded):
        def step(self) -> Any:
            if self.n_steps == 3:
                raise ZeroDivisionError("a bug")
            return super().step()

    made: list[Broken] = []

    def broken() -> Engine:
        made.append(Broken(FakeModel(max_batch=1)))
        return made[0]

    async def test() -> None:
        engine = AsyncEngine(broken)
        waiting: list[Any] = [engine.generate([n], **GREEDY) for n in range(1, 4)]
        waiting += [ids_of_stream(engine, [n], **GREEDY) for n in range(1, 4)]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        errors += await asyncio.gather(
            engine.generate([1]), engine.call(repr), engine.close(), return_exceptions=True
        )
        assert [str(each) for each in errors] == [
            "the engine's thread failed: ZeroDivisionError('a bug')"
        ] * 9
        assert isinstance(errors[0].__cause__, ZeroDivisionError)
        assert made[0].is_closed

    run(test)


def test_an_engine_that_cannot_be_made() -> None:
    refusal = ArtifactError("no such artifact", "compile one")

    def refuse() -> Engine:
        raise refusal

    async def test() -> None:
        with pytest.raises(ArtifactError, match="no such artifact"):
            async with AsyncEngine(refuse):
                pytest.fail("it was made")
        engine = AsyncEngine(refuse)
        with pytest.raises(ArtifactError, match="no such artifact"):
            await engine.generate([1])
        with pytest.raises(ArtifactError, match="no such artifact"):
            await anext(engine.stream([1]))
        with pytest.raises(ArtifactError, match="no such artifact"):
            await engine.close()

    run(test)


def test_an_engine_that_cannot_be_closed() -> None:
    class Sealed(Engine):
        def close(self) -> None:
            raise FileError("no space", "make some")

    async def test() -> None:
        with pytest.raises(FileError, match="no space"):
            async with AsyncEngine(lambda: Sealed(FakeModel())) as engine:
                assert len((await engine.generate([1], max_tokens=2)).ids) == 2

    run(test)


def test_closing_ends_what_runs() -> None:
    model = GatedModel(max_batch=2)
    made: list[Recorded] = []

    def recorded() -> Engine:
        made.append(Recorded(model, queue_bound=2))
        return made[0]

    async def test() -> None:
        engine = AsyncEngine(recorded)
        running = asyncio.create_task(engine.generate([1, 2], **GREEDY))
        streaming = asyncio.create_task(ids_of_stream(engine, [3], **GREEDY))
        model.gate.release(5)
        await started(lambda: len(model.calls), 5)
        many = asyncio.create_task(engine.generate([[n] for n in range(1, 9)], **GREEDY))
        await asyncio.sleep(0)
        closing = asyncio.gather(engine.close(), engine.close())
        late = asyncio.create_task(engine.generate([4]))
        await asyncio.sleep(0)
        model.open()
        await closing
        result = await running
        assert result.finish_reason == "cancelled"
        assert 3 <= len(result.ids) <= 6
        assert (await streaming)[-1] is None
        for task in (late, many):
            with pytest.raises(RequestError, match="the engine is closed"):
                await task
        await engine.close()
        assert made[0].is_closed
        assert made[0].kv.n_used == 0
        assert not made[0].has_work
        assert len(made[0].threads) == 1
        assert threading.get_ident() not in made[0].threads

    run(test)


def test_a_loop_that_closed_leaves_nothing_running() -> None:
    model = GatedModel()
    engine = AsyncEngine(lambda: Engine(model))
    loop = asyncio.new_event_loop()
    stream = engine.stream([1], **GREEDY)
    model.gate.release(1)
    loop.run_until_complete(anext(stream))
    loop.close()
    model.open()

    async def test() -> None:
        while await engine.call(lambda inner: inner.has_work):
            pass
        assert await n_used(engine) == 0
        await engine.close()

    run(test)
    assert len(model.calls) < 10


def test_an_engine_nobody_holds_is_closed() -> None:
    made: list[Recorded] = []

    def recorded() -> Engine:
        made.append(Recorded(FakeModel()))
        return made[0]

    async def test() -> None:
        engine = AsyncEngine(recorded)
        await engine.generate([1], max_tokens=2)
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is None
        assert made[0].is_closed

    run(test)
