"""Records of steps as lines and as sums."""

from __future__ import annotations

import io
import json

from xpuc.runtime.phases import JsonLines, StepCounters, StepRecord


def test_a_record_is_a_line_of_json() -> None:
    file = io.StringIO()
    write = JsonLines(file)
    write(StepRecord(step=1, model_ns=5))
    write(StepRecord(step=2, failed=True))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [(line["step"], line["model_ns"], line["failed"]) for line in lines] == [
        (1, 5, False),
        (2, 0, True),
    ]
    assert set(lines[0]) == set(StepRecord.__slots__)


def test_counters_are_sums() -> None:
    counters = StepCounters()
    counters.add(StepRecord(n_rows=3, n_preempted=1))
    counters.add(StepRecord(n_rows=4, failed=True))
    assert (counters.n_steps, counters.n_failed) == (2, 1)
    assert (counters.sums["n_rows"], counters.sums["n_preempted"]) == (7, 1)
