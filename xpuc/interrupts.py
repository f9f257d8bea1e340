"""Ctrl-C, which a terminal sends to every process of a session, and only one is to take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
def told(tell: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls this, whenever it comes, and does nothing else."""

    def note(number: int, frame: FrameType | None) -> None:
        tell()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def noted(pressed: threading.Event) -> Iterator[None]:
    """Ctrl-C sets this; the second time it interrupts at once."""

    def press() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    with told(press):
        yield
