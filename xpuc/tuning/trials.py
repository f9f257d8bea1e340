"""What was measured so far: a line for each trial, appended as it ends, read again by --resume."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpuc.tune_db import Measurement

MEASURED, WRONG, CRASHED, REFUSED = "measured", "wrong", "crashed", "refused"
LOST = "lost"  # of a GPU: with its board, once; it is tried again
KEPT, NOTHING = "kept", "nothing faster"  # how a task is concluded


@dataclass(frozen=True)
class Trial:
    """One candidate of a task.

    `measured` has a row for each number of rows: its median beside that of the incumbent
    (`default_us`). `outcome`: measured, wrong (another result), crashed, or refused (does not
    build); the last trial of a task says that its knobs were kept, or that nothing was faster.
    `detail` says more; `seconds` are those of the session when it ended; `is_faster`: than the
    incumbent, beyond the noise, with every number of rows. `beside_defaults`: of a GPU, what was
    kept is also measured beside the defaults, for its record.
    """

    task: str
    schedule: str
    knobs: dict[str, int]
    kernel: str
    outcome: str
    measured: tuple[Measurement, ...] = ()
    error: float = 0.0
    board: str = ""
    seconds: float = 0.0
    detail: str = ""
    is_faster: bool = False
    beside_defaults: tuple[Measurement, ...] = ()

    @property
    def concludes(self) -> bool:
        """Whether the task needs no more trials."""
        return self.outcome in (KEPT, NOTHING)

    @property
    def gain(self) -> float:
        """How many times as fast as the incumbent, where it gains least."""
        return min((m.default_us / m.us for m in self.measured), default=0.0)

    @property
    def counts(self) -> float:
        """Its gain for a search: what is not faster beyond the noise is no better."""
        return self.gain if self.is_faster else min(self.gain, 1.0)


class TrialLog:
    """The file of a session's trials. A line that was cut off by a stop is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def before(self) -> Path:
        """The folder of the records that were in use when the session began."""
        return self.path.parent / "before"

    def start(self, records: Path) -> None:
        """Start anew; the records of a folder are kept as they are now."""
        self.before.mkdir(parents=True, exist_ok=True)
        kept = self.before / self.path.name
        kept.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(records / self.path.name, kept)
        self.path.write_text("", encoding="utf-8")

    def append(self, trial: Trial) -> None:
        """Add a trial; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(dataclasses.asdict(trial)) + "\n"
        with self.path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            cut = file.read() not in (b"", b"\n")
            file.write(b"\n" * cut + line.encode())

    def read(self) -> Iterator[Trial]:
        """The trials in order."""
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                raw: dict[str, Any] = json.loads(line)
                for name in ("measured", "beside_defaults"):
                    raw[name] = tuple(Measurement(**m) for m in raw.get(name, ()))
                yield Trial(**raw)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
