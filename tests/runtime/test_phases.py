"""Records of steps as lines and as sums."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from xpuc.errors import FileError
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


def test_a_log_goes_on_where_it_ended_and_has_each_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for n in (1, 2):
        write = JsonLines.open(path)
        write(StepRecord(step=n))
        assert len(path.read_text().splitlines()) == n
        write.close()
        write.close()
        write(StepRecord(step=9))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_log_ends_where_the_disk_does(caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        n_asked = 0

        def write(self, text: str) -> int:
            self.n_asked += 1
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    file = Full()
    write = JsonLines(file)
    write(StepRecord())
    write(StepRecord())
    assert file.n_asked == 1
    assert "the step log ends here (No space left on device)" in caplog.text
    write.close()


def test_a_log_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="the step log cannot be written"):
        JsonLines.open(tmp_path / "missing" / "steps.jsonl")


def test_counters_are_sums() -> None:
    counters = StepCounters()
    counters.add(StepRecord(n_rows=3, n_preempted=1))
    counters.add(StepRecord(n_rows=4, failed=True))
    assert (counters.n_steps, counters.n_failed) == (2, 1)
    assert (counters.sums["n_rows"], counters.sums["n_preempted"]) == (7, 1)
