"""A progress bar for each phase of a compilation, where stderr is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, int, int], None]  # phase, done, total (0: not known)


@contextmanager
def phases() -> Iterator[Advance]:
    """What to call as a phase begins and goes on; one begins when its name first comes."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: list[TaskID] = []
    names: list[str] = []

    def advance(phase: str, done: int, total: int) -> None:
        if not names or names[-1] != phase:
            if tasks:
                bar.update(tasks[-1], total=1, completed=1)
                bar.stop_task(tasks[-1])
            names.append(phase)
            tasks.append(bar.add_task(phase, total=None))
        if total:
            bar.update(tasks[-1], total=total, completed=done)

    with bar:
        yield advance
        if tasks:
            bar.update(tasks[-1], total=1, completed=1)
