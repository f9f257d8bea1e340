"""Ctrl-C, which a terminal sends to every process of a session, and only one is to take."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C waits for the end of this; a process that is started in here never gets it."""
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
