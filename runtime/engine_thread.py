"""The thread that makes an engine, drives it and closes it, and how tasks of asyncio talk to it.

TVM keeps its pool of worker threads per calling thread, so one thread does all of that. Callers
leave commands, which it carries out between two steps, all of them before the next one; nothing
else touches the engine, so nothing locks it. With nothing to do it sleeps until a command comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from xpuc.errors import RequestError, XpucError
from xpuc.runtime.engine import Engine, Event
from xpuc.runtime.generation import Result
from xpuc.runtime.prompts import Prompt
from xpuc.runtime.sequence import Request

log = logging.getLogger(__name__)

_EXIT_S = 10.0  # how long the process waits at its end for an engine that nobody closed


class Command(NamedTuple):
    """What the engine's thread is asked to do."""

    run: Callable[[Engine], None]
    fail: Callable[[Exception], None]  # told what `run` raised, or why it will never run


class Failure(NamedTuple):
    error: Exception


class Mailbox:
    """What the engine's thread sends to the task that made this."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, item: Any) -> None:
        """From any thread. With a loop that has closed its tasks have ended too."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)

    def fail(self, error: Exception) -> None:
        """Let `receive` raise it."""
        self.send(Failure(error))

    async def receive(self) -> Any:
        item = await self.items.get()
        if isinstance(item, Failure):
            raise item.error
        return item


class Job:
    """Prompts of one caller; all but the mailbox belongs to the engine's thread.

    The mailbox gets the list of their results once all have ended or, with `wants_chunks`, every
    chunk and then None.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        add: Callable[[Engine, Prompt], Request],
        *,
        may_wait: bool = False,
        wants_chunks: bool = False,
    ) -> None:
        self.mailbox = Mailbox()
        self.add = add
        self.wants_chunks = wants_chunks
        self.may_wait = may_wait
        self.unasked = deque(prompts)
        self.requests: list[Request] = []
        self._answers: dict[int, dict[int, Result]] = {}  # by id and index
        self._n_ended = 0

    def ask(self, engine: Engine) -> Request:
        """Queue the next prompt."""
        request = self.add(engine, self.unasked[0])
        self.unasked.popleft()
        self.requests.append(request)
        self._answers[request.id] = {}
        return request

    def has_ended(self, request: Request) -> bool:
        return len(self._answers[request.id]) == request.params.n

    def letters(self, event: Event) -> list[Any]:
        """Take an event in; what the caller is sent for it."""
        if event.result is not None:
            self._answers[event.request.id][event.index] = event.result
            self._n_ended += self.has_ended(event.request)
        is_done = not self.unasked and self._n_ended == len(self.requests)
        if self.wants_chunks:
            return [event.chunk, None] if is_done else [event.chunk]
        return [[self._result(each) for each in self.requests]] if is_done else []

    def _result(self, request: Request) -> Result:
        first, *others = (self._answers[request.id][i] for i in range(request.params.n))
        return replace(first, others=tuple(others))


class EngineThread(threading.Thread):
    """Carries out commands, steps the engine and sends what comes of it, until `stop`.

    error: why it ended, if not by `stop`; or why the engine could not be closed.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        super().__init__(name="xpuc engine", daemon=True)
        self.error: Exception | None = None
        self._make_engine = make_engine
        # Shared with the callers, under the condition.
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._refusal: Exception | None = None  # why commands are refused
        # The thread's own.
        self._jobs: dict[int, Job] = {}  # by id of the request
        self._backlog: deque[Job] = deque()  # lists the queue has no room for yet

    def put(self, command: Command) -> None:
        """From any thread."""
        with self._changed:
            refusal = self._refusal
            if refusal is None:
                self._commands.append(command)
                self._changed.notify()
        if refusal is not None:
            command.fail(refusal)

    def stop(self) -> None:
        """Refuse commands from now on, carry out those there are, then end all."""
        with self._changed:
            if self._refusal is None:
                self._refusal = _closed()
                self._changed.notify()

    def end(self) -> None:
        """Stop, and give the thread a moment to end: it must not be in the middle of a kernel
        when the process ends."""
        self.stop()
        if threading.current_thread() is not self:
            self.join(_EXIT_S)

    def add(self, job: Job, engine: Engine) -> None:
        """Queue the job's prompts, those of a list as far as there is room; on a refusal none."""
        try:
            while job.unasked and (not job.may_wait or engine.scheduler.n_queue_free > 0):
                self._jobs[job.ask(engine).id] = job
        except Exception:
            self.cancel(job, engine)
            raise
        if job.unasked:
            self._backlog.append(job)

    def cancel(self, job: Job, engine: Engine) -> None:
        """End the job's requests; its caller is told no more."""
        job.unasked.clear()
        for request in job.requests:
            if self._jobs.pop(request.id, None) is not None:
                engine.cancel(request)

    def run(self) -> None:
        try:
            with self._make_engine() as engine:
                self._serve(engine)
        except XpucError as error:
            self.error = error
        except BaseException as error:
            log.debug("the engine's thread failed", exc_info=True)
            self.error = RuntimeError(f"the engine's thread failed: {error!r}")
            self.error.__cause__ = error
        self._fail_all(self.error or _closed())

    def _serve(self, engine: Engine) -> None:
        is_stopping = False
        while not is_stopping:
            commands, is_stopping = self._take(wait=not (engine.has_work or self._backlog))
            for command in commands:
                try:
                    command.run(engine)
                except Exception as error:
                    command.fail(error)
            if is_stopping:
                self._cancel_all(engine)
            self._step(engine)

    def _take(self, *, wait: bool) -> tuple[list[Command], bool]:
        """All commands, and whether these are the last; `wait` for one if there is none."""
        with self._changed:
            while wait and not self._commands and self._refusal is None:
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
            return commands, self._refusal is not None

    def _step(self, engine: Engine) -> None:
        for job in [self._backlog.popleft() for _ in range(len(self._backlog))]:
            try:
                self.add(job, engine)
            except Exception as error:
                job.mailbox.fail(error)
        if engine.has_work:
            self._send(engine, engine.step())

    def _send(self, engine: Engine, events: list[Event]) -> None:
        """Events to their callers: each loop is woken once."""
        letters: defaultdict[asyncio.AbstractEventLoop, list[tuple[Job, Any]]] = defaultdict(list)
        for event in events:
            job = self._jobs.get(event.request.id)
            if job is None:  # cancelled by its caller
                continue
            loop = job.mailbox.loop
            if loop.is_closed():
                self.cancel(job, engine)
                continue
            for letter in job.letters(event):
                letters[loop].append((job, letter))
            if job.has_ended(event.request):
                del self._jobs[event.request.id]
        for loop, of_loop in letters.items():
            with contextlib.suppress(RuntimeError):  # it has closed just now
                loop.call_soon_threadsafe(_hand_out, of_loop)

    def _cancel_all(self, engine: Engine) -> None:
        for job in self._backlog:
            self.cancel(job, engine)
            job.mailbox.fail(_closed())
        self._backlog.clear()
        for job in self._jobs.values():
            for request in job.requests:
                engine.cancel(request)

    def _fail_all(self, error: Exception) -> None:
        """Nothing will be done any more: refuse commands, and tell all who wait."""
        with self._changed:
            self._refusal = error
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command.fail(error)
        for job in {*self._jobs.values(), *self._backlog}:
            job.mailbox.fail(error)
        self._jobs.clear()
        self._backlog.clear()


def _hand_out(letters: list[tuple[Job, Any]]) -> None:
    """In the loop of their mailboxes."""
    for job, letter in letters:
        job.mailbox.items.put_nowait(letter)


def _closed() -> RequestError:
    return RequestError("the engine is closed", "make another one, or close it later")
