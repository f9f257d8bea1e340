"""What each step of the engine did and where its time went: records, their sums, their file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(slots=True)
class StepRecord:
    """One step. Times in ns, tokens and sequences counted.

    admission_ns  deciding who comes in, prefixes found and blocks of the store read included
    reserve_ns    giving running sequences the blocks of their next tokens
    model_ns      the model's call, and filling its batch
    total_ns      from the plan to the last token delivered: what a stream waits for its next one
    n_rows        decode_tokens + prefill_tokens
    n_admitted    newcomers; n_resumed: preempted sequences that run again
    n_small       1 if the chunk budget left a waiting prompt fewer tokens than the least chunk
    n_queue       sequences that wait, preempted ones included, after the plan
    """

    step: int = 0
    start_ns: int = 0
    admission_ns: int = 0
    reserve_ns: int = 0
    model_ns: int = 0
    total_ns: int = 0
    n_rows: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    n_preempted: int = 0
    n_admitted: int = 0
    n_resumed: int = 0
    n_small: int = 0
    n_running: int = 0
    n_queue: int = 0
    n_free_blocks: int = 0
    n_copies: int = 0
    failed: bool = False


_SUMMED = (
    "admission_ns", "reserve_ns", "model_ns", "total_ns", "n_rows", "decode_tokens",
    "prefill_tokens", "n_preempted", "n_admitted", "n_resumed", "n_small", "n_copies",
)  # fmt: skip


@dataclass(slots=True)
class StepCounters:
    """Sums over all steps, by the record's names."""

    n_steps: int = 0
    n_failed: int = 0
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))

    def add(self, record: StepRecord) -> None:
        self.n_steps += 1
        self.n_failed += record.failed
        sums = self.sums
        for name in _SUMMED:
            sums[name] += getattr(record, name)


class JsonLines:
    """Writes each record as a line of JSON; give it to Scheduler as `on_step`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, record: StepRecord) -> None:
        self._file.write(json.dumps(dataclasses.asdict(record)) + "\n")
