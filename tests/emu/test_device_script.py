"""tests/device/run.sh on the emulated GPU: what a box runs, with a tiny model and three kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activations import q8a, q8a_shapes
from device import bundle
from device.libraries import build
from device.recorder import Recording, recording
from emu import compiler
from emu.device import Emulator, Out, run
from expectations import close, same

from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.schedules.cuda import elementwise
from xpuc.schedules.cuda.quantize import quantize

pytestmark = pytest.mark.slow


class Subtracting(Emulator):
    """A compiler whose code adds wrongly."""

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        assert " + delta" in source
        return super().compile(source.replace(" + delta", " - delta"), archs)


class Endless(Emulator):
    """A compiler whose quantisation never ends."""

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        body = source.index("{", source.rindex("quantize_160_rn_0_kernel("))
        loop = " for (volatile int i = 0; i == 0;) {} "
        return super().compile(f"{source[: body + 1]}{loop}{source[body + 1 :]}", archs)


def vectors(path: Path, compiler: Emulator) -> None:
    """Recorded calls of three kernels, the last of which is held to nothing."""
    x = np.random.default_rng(0).standard_normal((5, 160), np.float32)
    with recording(Recording()) as recorded:
        outputs = [Out(*shape) for shape in q8a_shapes(160, len(x))]
        for got, want in zip(run(quantize(160, None), x, *outputs), q8a(x), strict=True):
            same(got, want)
        (h,) = run(elementwise.residual_add(160, 5), x, 3 * x, Out((5, 160), "float32"))
        close(h[3:, 1::2], 4 * x[3:, 1::2].astype(np.float64), 1e-6)
        recorded.end("passed", passed=True)
        run(elementwise.residual_add(160, 5), x, x, Out((5, 160), "float32"))
        recorded.end("failed", passed=False)
        rows = np.array([4, 0], np.int32)
        run(elementwise.take_rows(160, 5, 2), x, rows, Out((2, 160), "float32"))
        recorded.end("compares nothing", passed=True)
    recorded.write(path)
    build(path, compiler)


@pytest.fixture(scope="module")
def results(
    on_gpu: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the script writes."""
    out = tmp_path_factory.mktemp("bundle")
    bundle.fetch_wheels(out / "wheels", [f"{sys.version_info.major}.{sys.version_info.minor}"])
    (out / "tiny.xpuc").symlink_to(on_gpu("llama"))
    vectors(out / "kernels" / "a.ir", Emulator())
    vectors(out / "wrong" / "a.ir", Subtracting())
    vectors(out / "endless" / "a.ir", Endless())
    sizes = {"generated": "3", "prompts": "16", "depths": "0,20", "batches": "1,2", "rounds": "1"}
    called = ("python", "vectors.py")
    patient = 600  # an emulated GPU on a machine with other work
    parts = [
        bundle.part("doctor", patient, "xpuc", "doctor", "--json")
        | {"exit_codes": [0, 1], "expected": {"can_run_cuda": True, "can_compile": False}},
        bundle.part("kernels", patient, *called, "kernels", "tiny.xpuc", patient),
        bundle.part("wrong", patient, *called, "wrong", "tiny.xpuc", patient),
        bundle.part("endless", patient, *called, "endless", "tiny.xpuc", patient, 5),
        bundle.part("hangs", 1.5, "sleep", "60"),
        bundle.part(
            "tokens", patient, "xpuc", "run", "tiny.xpuc", "-p", "a", "--raw", "-n", 2, "--json"
        )
        | {"expected": {"ids": ["none"]}},
        *({**each, "limit_s": patient} for each in bundle.benchmarks("tiny.xpuc", **sizes)),
    ]
    plan = {"about": {"revision": "a test's"}, "limit_s": 4 * patient, "parts": parts}
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
    assert failed.keys() == {"wrong", "endless", "hangs", "tokens"}, results
    assert failed["wrong"] == "exit code 1"
    assert failed["hangs"].startswith("not done after ")
    assert failed["tokens"].endswith("expected ['none']")


def test_kernels_are_held_to_numpys_numbers(results: dict[str, Any]) -> None:
    """A kernel that is wrong on the box fails, and whose numbers nobody knows is named."""
    right, wrong = results["kernels"]["found"], results["wrong"]["found"]
    assert (right["calls"], right["same_bits"], right["wrong"]) == (3, 3, [])
    assert right["unchecked"] == wrong["unchecked"] == ["take_rows_160_r2"]
    for row in right["rows"]:
        assert all(off <= 1e-6 for off in row["differences"])
    assert (wrong["calls"], wrong["same_bits"], wrong["wrong"]) == (3, 2, ["add_160_r5"])
    (row,) = (each for each in wrong["rows"] if each["wrong"])
    assert row["test"] == "passed"
    assert row["differences"] == [pytest.approx(1.5)]  # -2 x in place of 4 x
    assert row["tolerances"] == [1e-5]  # a GPU's at least


def test_a_kernel_that_does_not_end_costs_no_other_its_row(results: dict[str, Any]) -> None:
    found = results["endless"]["found"]
    assert (found["calls"], found["same_bits"], found["not_made"]) == (3, 2, 0)
    assert found["wrong"] == ["quantize_160_rn"]
    assert found["rows"][0]["error"] == "not done after 5 s"


def test_speed_is_measured_of_each_test_and_kernel(results: dict[str, Any]) -> None:
    parts = (results[name]["found"] for name in ("decode", "decode_at_20"))
    decode = {row["test"]: row for found in parts for row in found}
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
