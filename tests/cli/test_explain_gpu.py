"""`xpuc explain` of an artifact for GPUs, on a machine that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import invoke

pytestmark = pytest.mark.slow


def test_a_decode_step_is_predicted_and_what_ptxas_said_is_shown(
    checkpoint: Path, tmp_path: Path
) -> None:
    artifact, target = tmp_path / "m.xpuc", "cuda -arch=sm_90a"
    done = invoke(
        "compile", checkpoint, "--target", target, "--max-batch", 1, "--ctx", 64, "-o", artifact
    )
    assert done.code == 0, done.err
    facts = invoke("explain", artifact, "--gpu", "H200", "--json").json
    predicted = facts["predicted"]
    assert facts["step_us"] is None
    assert predicted["bound"] == "launch"
    uses = {o["name"]: o["uses"] for o in facts["operations"]}
    each = predicted["operations"]
    assert set(each) == set(uses)
    assert predicted["launches"] == sum(uses[name] * o["launches"] for name, o in each.items())
    for operation in facts["operations"]:
        assert {f"{k}_kernel" for k in operation["kernels"]} == {
            row["kernel"] for row in operation["ptxas"]
        }
    shown = invoke("explain", artifact, "--gpu", "H200").out
    assert "predicted for H200, not measured" in shown
    refused = invoke("explain", artifact, "--gpu", "H200", "--entry", "prefill_greedy")
    assert "have any number of rows" in refused.err
