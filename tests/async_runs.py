"""Running an AsyncEngine on the fake model: a test that hangs fails, and a model that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from fake_model import FakeModel

from xpuc.runtime.async_engine import AsyncEngine
from xpuc.runtime.engine import Engine

TIMEOUT_S = 20.0
GREEDY: dict[str, Any] = {"temperature": 0}


class GatedModel(FakeModel):
    """Takes only as many steps as `gate` was released for."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.gate = threading.Semaphore(0)

    def run(self, batch: Any, *, tail: Any) -> Any:
        assert self.gate.acquire(timeout=TIMEOUT_S)
        return super().run(batch, tail=tail)

    def open(self) -> None:
        self.gate.release(100_000)


class Recorded(Engine):
    """Notes the threads that use it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threads = {threading.get_ident()}
        self.n_steps = 0
        self.is_closed = False

    def step(self) -> Any:
        self.threads.add(threading.get_ident())
        self.n_steps += 1
        return super().step()

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.is_closed = True
        super().close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


async def n_used(engine: AsyncEngine) -> int:
    """Blocks in use once all commands so far have had their step."""
    await engine.call(lambda _: None)
    return await engine.call(lambda inner: inner.kv.n_used)


async def started(count: Callable[[], int], n: int) -> None:
    while count() < n:
        await asyncio.sleep(0.001)


async def ids_of_stream(engine: AsyncEngine, prompt: Any, **options: Any) -> list[int | None]:
    return [chunk.id async for chunk in engine.stream(prompt, **options)]
