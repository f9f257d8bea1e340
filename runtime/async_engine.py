"""The engine for asyncio: tasks of any loop ask, one thread does the work (engine_thread.py)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.engine_thread import Command, EngineThread, Job, Mailbox
from xpuc.runtime.generation import Chunk, Result
from xpuc.runtime.prompts import Message, Prompt, is_prompt
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.runtime.sequence import Request

__all__ = ["AsyncEngine"]

_T = TypeVar("_T")


class AsyncEngine:
    """An Engine in a thread of its own, for asyncio.

        async with AsyncEngine.load("model.xpuc") as engine:
            result = await engine.generate("Hello", max_tokens=16)
            async for chunk in engine.stream("Hello"):
                ...

    Its methods may be called from any event loop in any thread. A request ends, and its K/V is
    free, when the task that awaits it is cancelled or the iterator of its chunks is closed. What
    waits for a slow reader is kept for it without bound (at most one chunk a token of the context)
    and holds up nobody else.

    `make_engine` runs in the thread, at once; `async with` waits for it, and so does every
    request. What it raises is raised there.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._thread = EngineThread(make_engine)
        self._thread.start()
        weakref.finalize(self, EngineThread.end, self._thread)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Self:
        """On the artifact at `path`; `options` are those of runtime.engine.load."""
        return cls(partial(load, path, **options))

    async def __aenter__(self) -> Self:
        try:
            await self.call(lambda engine: None)
        except BaseException:
            self._thread.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs ("cancelled"), close the engine and wait for its thread to end.

        Later requests are refused (RequestError). May be repeated. Raises why the thread failed, if
        it did.
        """
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)
        if self._thread.error is not None:
            raise self._thread.error

    @overload
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Result: ...
    @overload
    async def generate(
        self,
        prompt: Many[str] | Many[Many[int]] | Many[Many[Message]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Result]: ...
    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> Result | list[Result]:
        """The answer to a prompt, or to each of a list of prompts; see Engine.generate.

        `options` are all that Engine.add_request takes, so `priority` and `salt` are among them.
        RequestError if one of them is refused: those that run are cancelled. A single prompt is
        refused when the queue is full, the prompts of a list wait for room in it.
        """
        is_one = is_prompt(prompt)
        prompts = [prompt] if is_one else list(prompt)
        job = Job(prompts, partial(_add, params, options), may_wait=not is_one)
        results: list[Result] = await self._begin(job)
        return results[0] if is_one else results

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes: one chunk a token. Closing the iterator cancels the request.

        The request, and its refusal, comes with the first chunk asked for.
        """
        n = options.get("n", 1 if params is None else params.n)
        if n != 1:
            raise RequestError(f"a stream is of one answer, n is {n}", "use `generate`")
        job = Job([prompt], partial(_add, params, options), wants_chunks=True)
        chunk: Chunk | None = await self._begin(job)
        try:
            while chunk is not None:
                yield chunk
                chunk = await job.mailbox.receive()
        except BaseException:
            self._cancel(job)
            raise

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """What `function` returns for the engine, or raises: it runs in the engine's thread,
        between two steps, so it should be quick."""
        mailbox = Mailbox()
        self._thread.put(Command(lambda engine: mailbox.send(function(engine)), mailbox.fail))
        result: _T = await mailbox.receive()
        return result

    async def _begin(self, job: Job) -> Any:
        """Hand a job over; the first that comes of it."""
        self._thread.put(Command(partial(self._thread.add, job), job.mailbox.fail))
        try:
            return await job.mailbox.receive()
        except BaseException:
            self._cancel(job)
            raise

    def _cancel(self, job: Job) -> None:
        self._thread.put(Command(partial(self._thread.cancel, job), _ignore))


def _add(
    params: SamplingParams | None, options: dict[str, Any], engine: Engine, prompt: Prompt
) -> Request:
    return engine.add_request(prompt, params, **options)


def _ignore(error: Exception) -> None:
    """Nobody waits to be told."""
