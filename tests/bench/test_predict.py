"""What a decode step on a GPU is predicted to take."""

from __future__ import annotations

import gpu_bounds
import pytest

from xpuc.bench.predict import (
    GPUS,
    INSTRUCTIONS,
    LAUNCH_US,
    REACHED,
    Predicted,
    PredictedStep,
    predict,
)


def test_every_gpu_has_facts() -> None:
    from xpuc.cli.explain import GPUS as named

    assert set(named) == set(GPUS)


def test_every_quantised_format_has_its_instructions() -> None:
    assert set(INSTRUCTIONS) == set(gpu_bounds.QUANTISED)


@pytest.mark.parametrize(
    ("memory_us", "issue_us", "us", "bound"),
    [(10.0, 4.0, 12.0, "bandwidth"), (4.0, 10.0, 12.0, "issue"), (1.0, 0.5, 3.0, "launch")],
)
def test_the_longest_part_bounds_a_call(
    memory_us: float, issue_us: float, us: float, bound: str
) -> None:
    one = Predicted("k", 2, 100, 1, memory_us, issue_us)
    assert (one.us, one.bound) == (us, bound)


def test_a_step_is_the_sum_of_its_calls() -> None:
    matrix = Predicted("linear", 3, 100, 1, 8.0, 1.0)
    norm = Predicted("block_norm", 2, 0, 2, 0.0, 0.0)
    step = PredictedStep("H200", 4, 3, {each.name: each for each in (matrix, norm)})
    assert step.us == 3 * (8 + LAUNCH_US) + 2 * 2 * LAUNCH_US
    assert step.tok_s == pytest.approx(4e6 / step.us)
    assert step.launches == 7
    assert step.bound == "bandwidth"
    assert step.bounds_us["launch"] == 4 * LAUNCH_US
    assert step.layer_launches == 2
    said = "\n".join(step.lines())
    assert "7 launches (2 a layer)" in said
    assert "bandwidth 8.0, issue 1.0, launch 2.0 (100 bytes, 1 launch)" in said
    assert "predicted for H200, not measured" in said
    assert f"{REACHED:.0%} of the bandwidth" in said


def test_operations_read_their_weights_and_what_attention_sees() -> None:
    attention = {"kv_heads": 8, "head_dim": 128, "window": 0}
    common = {"uses": {"decode": 2}, "block_tokens": 16, "kv_dtype": "float16", "attrs": {}}
    operations = [
        common | {"name": "linear", "op": "linear", "weights": [["Q4_K", 4096, 4096]],
                  "kernels": ["l"]},
        common | {"name": "embed", "op": "embed", "weights": [["Q8_0", 128256, 4096]],
                  "kernels": ["e"]},
        common | {"name": "all", "op": "attention", "weights": [], "kernels": ["split", "reduce"],
                  "attrs": attention},
        common | {"name": "window", "op": "attention", "weights": [], "kernels": ["s"],
                  "attrs": attention | {"window": 100}},
        common | {"name": "other", "op": "add", "weights": [], "kernels": ["a"],
                  "uses": {"prefill": 1}},
    ]  # fmt: skip
    found = predict(operations, "decode", 1, 1023, "H200").operations
    assert set(found) == {"linear", "embed", "all", "window"}
    assert found["linear"].n_bytes == 4096 * 16 * (128 + 8 + 8 + 2 + 2)
    assert found["linear"].memory_us == pytest.approx(4096 * 16 * 148 / (REACHED * 4.8e6))
    issued = INSTRUCTIONS["Q4_K"] * 4096 * 4096 / 32
    assert found["linear"].issue_us == pytest.approx(issued / (132 * 4 * 1.98e3))
    assert found["embed"].n_bytes == 128 * 34
    assert found["all"].n_bytes == 1024 * 2 * 8 * 128 * 2
    assert found["all"].launches == 2
    assert found["window"].n_bytes == 100 * 2 * 8 * 128 * 2
