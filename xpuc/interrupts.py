"""How a process is asked to end: Ctrl-C, which a terminal sends to every process of a session and
only one is to take, and SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C waits for the end of this; a process that is started in here never gets it."""
    from multiprocessing import resource_tracker  # 20 ms; those who start no process have no need

    resource_tracker.ensure_running()  # which lets Ctrl-C through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def put_off() -> Iterator[None]:
    """Ctrl-C and a request to end wait for the end of this, which is to be short."""
    came: list[int] = []
    numbers = (signal.SIGINT, *_ENDS) if _may_be_interrupted() else ()
    before = {n: signal.signal(n, lambda number, frame: came.append(number)) for n in numbers}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    for number in came:
        signal.raise_signal(number)


@contextmanager
def heeding(ended_by: Callable[[int], object]) -> Iterator[None]:
    """A request to end interrupts, once, as Ctrl-C does: what is begun is cleared away.

    `ended_by` is told the signal. One that is ignored stays so.
    """
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not came:
            came.append(number)
            ended_by(number)
            raise KeyboardInterrupt

    numbers = _ENDS if _may_be_interrupted() else ()
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _may_be_interrupted() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def told(tell: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls this, whenever it comes, and does nothing else; so does a request to end that
    is heeded."""

    def note(number: int, frame: FrameType | None) -> None:
        heeded = before[signal.Signals(number)]
        if number in _ENDS and callable(heeded):
            with suppress(KeyboardInterrupt):
                heeded(number, frame)
        tell()

    numbers = (signal.SIGINT, *_ENDS) if _may_be_interrupted() else ()
    before = {n: signal.getsignal(n) for n in numbers}
    taken = [n for n in numbers if n is signal.SIGINT or callable(before[n])]
    for one in taken:
        signal.signal(one, note)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, before[one])


@contextmanager
def noted(pressed: threading.Event) -> Iterator[None]:
    """Ctrl-C sets this; the second time it interrupts at once."""

    def press() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    with told(press):
        yield
