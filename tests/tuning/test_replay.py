"""A bundle's candidates measured in processes of their own, by stand-ins of these."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuning import silent

from xpuc.tuning import replay
from xpuc.tuning.trials import TrialLog


@pytest.mark.slow
def test_a_candidate_that_does_not_end_has_crashed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, no_manifest = tmp_path / "r.jsonl", None
    results.write_text('{"results": 2}\n')
    monkeypatch.setattr(replay, "_work", silent.work)
    monkeypatch.setattr(replay, "_PATIENCE_S", 5)
    monkeypatch.setattr(replay, "_LEAVING_S", 0.1)
    player = replay.Replay(tmp_path, no_manifest, results)  # type: ignore[arg-type]
    assert player.run(seconds=60) == "done"
    (trial,) = TrialLog(results).read()
    assert (trial.kernel, trial.outcome) == ("endless", "crashed")
