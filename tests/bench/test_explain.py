"""An operation of the manifest joined with what its kernels took."""

from __future__ import annotations

import pytest

from xpuc.bench.explain import Step, explain
from xpuc.bench.profile import KernelRow, Profile
from xpuc.bench.roofs import Roofs

OPERATION = {
    "name": "attention heads=4 rows=1", "uses": {"decode": 3, "decode_greedy": 2},
    "schedule": "attention_split", "knobs": {"beside": 2}, "reason": "no record", "measured": [],
    "kernels": ["split", "reduce"],
}  # fmt: skip


def row(kernel: str, launches: int, us: float, n_bytes: int, limit_us: float) -> KernelRow:
    by = "memory" if limit_us else None
    return KernelRow(kernel, launches, us, 0.0, n_bytes, 0, by, limit_us, None)


def step(*rows: KernelRow) -> Step:
    return Step(Profile("1 row", 100.0, rows), Roofs(20e9, 400e9), 2)


def test_kernels_of_an_operation_are_added_up_per_call() -> None:
    # `reduce` is another operation's too: its four launches are averaged.
    found = explain(
        OPERATION,
        "decode_greedy",
        step(row("split", 2, 20.0, 800, 8.0), row("reduce", 4, 8.0, 0, 0)),
    )
    assert found.uses == 2
    assert found.measured_us == pytest.approx(12.0)
    assert found.n_bytes == 400
    assert found.roofline_us == found.predicted_us == pytest.approx(4.0)
    assert found.pct_roofline == pytest.approx(100 / 3)
    text = dict(found.lines())
    assert text["schedule"] == "attention_split (beside=2)"
    assert text["kernels"] == "split, reduce, 2 times a step"
    assert text["takes"] == "12.0 us, 4.0 us predicted (limit by memory), 33 % of the roofline"


def test_a_record_predicts_its_own_time() -> None:
    tuned = OPERATION | {"measured": [{"us": 9.5}], "reason": "record of 2026-11-30"}
    found = explain(tuned, "decode", step(row("split", 3, 30.0, 0, 3.0)))
    assert found.predicted_us == 9.5
    assert "9.5 us predicted (record)" in dict(found.lines())["takes"]
    assert found.as_json()["roofline_us"] == 1.0


def test_without_a_measurement_the_decisions_are_said() -> None:
    found = explain(OPERATION, "decode", None)
    assert set(dict(found.lines())) == {"schedule", "because", "kernels"}
    assert found.as_json()["measured_us"] is None


def test_what_ptxas_said_of_the_operation_s_kernels_is_shown() -> None:
    rows = [
        {"kernel": f"{name}_kernel", "arch": "sm_80", "registers": 40, "shared_bytes": 1024,
         "spill_store_bytes": 4, "spill_load_bytes": 8}
        for name in ("split", "other")
    ]  # fmt: skip
    found = explain(OPERATION, "decode", None, {"kernels": rows})
    said = dict(found.lines())["sm_80"]
    assert said == "split_kernel: 40 registers, 1,024 bytes shared, 12 spilled"
    assert found.as_json()["ptxas"] == rows[:1]
