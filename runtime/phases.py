"""What each step of the engine did and where its time went: records, their sums, their file."""

from __future__ import annotations

import dataclasses
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from operator import add, attrgetter
from pathlib import Path
from typing import Any, TextIO

from xpuc.errors import FileError
from xpuc.runtime.modes import Modes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepRecord:
    """One step. Times in ns, tokens and sequences counted.

    admission_ns  deciding who comes in, prefixes found and blocks of the store read included
    reserve_ns    giving running sequences the blocks of their next tokens
    model_ns      the model's call, and before it copying K/V and filling the batch
    fill_ns       of that, filling the batch: the host's part
    issue_ns      then queueing the call, with what it uploads; all of it where nothing may follow
    wait_ns       then waiting for the result of a call that is queued: the device's part that the
                  host does not hide
    total_ns      from the plan to the last token delivered: what a stream waits for its next one
    draft_ns      looking up what may come next
    n_rows        decode_tokens + n_drafted + prefill_tokens
    n_drafted     tokens computed that may come next; n_accepted: those that did
    n_admitted    newcomers; n_resumed: preempted sequences that run again
    n_ahead       1 if it was queued before the step before it was read. Then its times begin at the
                  end of that step, model_ns is the wait for its result (fill_ns and issue_ns were
                  spent before), and it is not taught
    n_dropped     rows of it that were for nobody, because the step before it ended them
    n_small       1 if the chunk budget left a waiting prompt fewer tokens than the least chunk
    n_queue       sequences that wait, preempted ones included, after the plan
    """

    step: int = 0
    start_ns: int = 0
    admission_ns: int = 0
    reserve_ns: int = 0
    draft_ns: int = 0
    model_ns: int = 0
    fill_ns: int = 0
    issue_ns: int = 0
    wait_ns: int = 0
    total_ns: int = 0
    n_rows: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_preempted: int = 0
    n_admitted: int = 0
    n_resumed: int = 0
    n_small: int = 0
    n_ahead: int = 0
    n_dropped: int = 0
    n_running: int = 0
    n_queue: int = 0
    n_free_blocks: int = 0
    n_copies: int = 0
    failed: bool = False


_SUMMED = (
    "admission_ns", "reserve_ns", "draft_ns", "model_ns", "fill_ns", "issue_ns", "wait_ns",
    "total_ns", "n_rows", "decode_tokens", "prefill_tokens", "n_drafted", "n_accepted",
    "n_preempted", "n_admitted", "n_resumed", "n_small", "n_ahead", "n_dropped", "n_copies",
)  # fmt: skip


_values_of = attrgetter(*_SUMMED)


class StepCounters:
    """Sums over all steps, by the record's names."""

    def __init__(self) -> None:
        self.n_steps = self.n_failed = 0
        self._sums = [0] * len(_SUMMED)

    @property
    def sums(self) -> dict[str, int]:
        return dict(zip(_SUMMED, self._sums, strict=True))

    def add(self, record: StepRecord) -> None:
        self.n_steps += 1
        self.n_failed += record.failed
        self._sums = list(map(add, self._sums, _values_of(record)))


class JsonLines:
    """Writes what the engine can do as a line of JSON, then each record; give it to Scheduler as
    `on_step`.

    Where the disk takes no more the log ends, and nothing else does.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_open = True

    @classmethod
    def open(cls, path: Path) -> JsonLines:
        """At the end of a file, a line on disk as soon as it is written."""
        try:
            return cls(path.open("a", buffering=1, encoding="utf-8"))
        except OSError as error:
            raise FileError(
                f"{path}: the step log cannot be written ({error.strerror})",
                "name a file in a folder that can be written",
            ) from None

    def begin(self, modes: Modes) -> None:
        """An engine begins: the line {"modes": {name: {is_on, reason}}}."""
        self._write({"modes": dataclasses.asdict(modes)})

    def __call__(self, record: StepRecord) -> None:
        self._write(dataclasses.asdict(record))

    def _write(self, facts: dict[str, Any]) -> None:
        if self._is_open:
            try:
                self._file.write(json.dumps(facts) + "\n")
            except OSError as error:
                self._is_open = False
                log.warning("the step log ends here (%s)", error.strerror)

    def close(self) -> None:
        """Nothing is written from now on; harmless when repeated."""
        self._is_open = False
        with suppress(OSError):
            self._file.close()
