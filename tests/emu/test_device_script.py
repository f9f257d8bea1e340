"""tests/device/run.sh on the emulated GPU: what a box runs, with a tiny model and two kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activations import q8a, q8a_shapes
from device import bundle
from device.libraries import build
from device.recorder import Recording
from emu import compiler
from emu.device import Emulator, Out, run

from xpuc.schedules.cuda import elementwise
from xpuc.schedules.cuda.quantize import quantize

pytestmark = pytest.mark.slow


def vectors(path: Path, *, is_wrong: bool) -> None:
    """Recorded calls of two kernels; of one with a wrong result."""
    recording = Recording()
    x = np.random.default_rng(0).standard_normal((5, 160), np.float32)
    outputs = [Out(*shape) for shape in q8a_shapes(160, len(x))]
    kernel = quantize(160, None)
    recording.add("quantize", kernel, (x, *outputs), list(q8a(x)))
    assert len(run(kernel, x, *outputs)) == 4
    add = elementwise.residual_add(160, 5)
    recording.add("add", add, (x, x, Out((5, 160), "float32")), [x + x + is_wrong])
    recording.write(path)
    build(path, Emulator())


@pytest.fixture(scope="module")
def results(
    on_gpu: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the script writes."""
    out = tmp_path_factory.mktemp("bundle")
    bundle.fetch_wheels(out / "wheels", [f"{sys.version_info.major}.{sys.version_info.minor}"])
    (out / "tiny.xpuc").symlink_to(on_gpu("llama"))
    vectors(out / "kernels" / "a.ir", is_wrong=False)
    vectors(out / "wrong" / "a.ir", is_wrong=True)
    sizes = {"generated": "3", "prompts": "16", "depths": "0,20", "batches": "1,2", "rounds": "1"}
    parts = [
        bundle.part("doctor", 60, "xpuc", "doctor", "--json")
        | {"exit_codes": [0, 1], "expected": {"can_run_cuda": True, "can_compile": False}},
        bundle.part("kernels", 60, "python", "vectors.py", "kernels", "tiny.xpuc"),
        bundle.part("wrong", 60, "python", "vectors.py", "wrong", "tiny.xpuc"),
        bundle.part("hangs", 1.5, "sleep", "60"),
        bundle.part("tokens", 60, "xpuc", "run", "tiny.xpuc", "-p", "a", "--raw", "-n", 2, "--json")
        | {"expected": {"ids": ["none"]}},
        *({**each, "limit_s": 120} for each in bundle.benchmarks("tiny.xpuc", **sizes)),
    ]
    plan = {"about": {"revision": "a test's"}, "limit_s": 400, "parts": parts}
    bundle.finish(out, plan)
    machine = {"LD_LIBRARY_PATH": str(compiler.driver_folder()), "PYTHON": sys.executable}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TVM"))}
    done = subprocess.run(
        [out / "run.sh", out / "found.json"], env=inherited | machine, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (out / "found.json").exists(), done.stderr
    assert done.returncode == 1  # parts failed, as they should
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    assert len(done.stdout.splitlines()) == len(parts)
    assert found["bundle"] == plan["about"]
    return dict(found["parts"])


def test_a_part_that_fails_is_recorded_and_the_others_go_on(results: dict[str, Any]) -> None:
    failed = {name: each["error"] for name, each in results.items() if "error" in each}
    assert failed.keys() == {"wrong", "hangs", "tokens"}, results
    assert failed["wrong"] == "exit code 1"
    assert failed["hangs"].startswith("not done after ")
    assert failed["tokens"].endswith("expected ['none']")


def test_kernels_are_compared_with_what_was_recorded(results: dict[str, Any]) -> None:
    right, wrong = results["kernels"]["found"], results["wrong"]["found"]
    assert (right["kernels"], right["same_bits"], right["wrong"]) == (2, 2, [])
    assert (wrong["kernels"], wrong["same_bits"]) == (2, 1)
    (row,) = (each for each in wrong["rows"] if each["wrong"])
    assert row["test"] == "add"
    assert row["differences"][0] > 0.1


def test_speed_is_measured_of_each_test_and_kernel(results: dict[str, Any]) -> None:
    decode = {row["test"]: row for row in results["decode"]["found"]}
    assert decode.keys() == {"tg3", "tg3 b2", "tg3 @ d20", "tg3 b2 @ d20"}
    for row in decode.values():
        assert row["bandwidth_gb_s"] > 0
        read = row["bytes_per_token"] * row["tok_s"] / 1e9
        assert row["pct_bandwidth"] == pytest.approx(100 * read / row["bandwidth_gb_s"])
    assert [row["test"] for row in results["prefill"]["found"]] == ["pp16"]
    for name in ("no_pipeline", "no_graphs"):
        assert [row["test"] for row in results[name]["found"]] == ["tg3"]
    profile = results["kernel_table"]["found"][-1]["profile"]
    kernels = [row for row in profile["rows"] if row["launches"]]
    assert len(kernels) > 5
    assert all(row["us"] > 0 for row in kernels)
