"""Make the folder that tests/device/run.sh measures on a GPU box without internet.

    python tests/device/bundle.py OUT --smollm2 SmolLM2.gguf [--tune BUNDLE] [--python 3.12]

It holds xpuc's wheel and those it needs for each CPython, artifacts compiled for GPUs (Llama 3 8B
without its weights; SmolLM2, whose weights are most of the bytes, if it is given), test vectors
of the kernels, and a plan of what to measure. --tune is a file of `xpuc tune --export`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import shapes
from device.libraries import build
from venvs import build_wheel

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
SCRIPTS = ("run.sh", "measure.py", "vectors.py")
MODEL, SMOLLM2, KERNELS, TUNE = "llama-3-8b.xpuc", "smollm2.xpuc", "kernels", "tune.bundle"
PROMPT, N_IDS = "The capital of France is", 16
LIMIT_S = 460  # of all parts; the whole script has 8 minutes
TESTS = (
    "test_products",
    "test_rows",
    "test_qk_prep",
    "test_attention",
    "test_int8",
    "test_matmul_hopper",
)
_PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64")


def main() -> None:
    """Make it, and say what it weighs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--smollm2", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tune", type=Path, metavar="BUNDLE")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=own, metavar="3.11,3.12", help="of the box")
    parser.add_argument("--target", default="cuda -arch=sm_80,sm_90a")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True)
    fetch_wheels(out / "wheels", given.python.split(","))
    compile_llama(out / MODEL, given.target)
    if given.smollm2 is not None:
        compile_smollm2(given.smollm2, out, given.target)
    record_kernels(out / KERNELS)
    if given.tune is not None:
        shutil.copyfile(given.tune, out / TUNE)
    finish(out, plan(out))
    sizes = {each.name: bytes_of(each) for each in sorted(out.iterdir())}
    for name, n_bytes in [*sizes.items(), ("all", sum(sizes.values()))]:
        sys.stdout.write(f"{n_bytes / 1e6:8.1f} MB  {name}\n")


def bytes_of(path: Path) -> int:
    """Of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def fetch_wheels(folder: Path, versions: Sequence[str]) -> None:
    """xpuc's, and those that a machine needs to run artifacts on a GPU."""
    folder.mkdir()
    wheel = build_wheel(folder)
    for version in versions:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += [f"--platform={each}" for each in _PLATFORMS]
        command += ["--python-version", version, "--dest", str(folder)]
        subprocess.run([*command, str(wheel), "nvidia-cuda-runtime==13.0.*"], check=True)


def compile_llama(path: Path, target: str) -> None:
    """Llama 3 8B in Q4_K_M, without its weights."""
    checkpoint = path.with_suffix(".gguf")
    shapes.write(shapes.SHAPES["llama-3-8b"], "Llama 3 8B", checkpoint)
    sizes = ("--ctx", "4096", "--max-batch", "16")
    xpuc("compile", checkpoint, "-o", path, "--target", target, "--synthetic", 1, *sizes)
    checkpoint.unlink()


def compile_smollm2(checkpoint: Path, out: Path, target: str) -> None:
    """For GPUs; and what the CPU answers, to compare with."""
    sizes = ("--ctx", "512", "--max-batch", "1")
    xpuc("compile", checkpoint, "-o", out / SMOLLM2, "--target", target, *sizes)
    here = out / "cpu.xpuc"
    xpuc("compile", checkpoint, "-o", here, *sizes)
    (out / "smollm2.json").write_text(json.dumps({"ids": json.loads(xpuc(*answer(here)))["ids"]}))
    shutil.rmtree(here)


def answer(artifact: Path | str) -> list[Any]:
    """The command whose answers are compared."""
    return ["run", artifact, "-p", PROMPT, "--raw", "-n", N_IDS, "--temp", 0, "--json"]


def record_kernels(folder: Path) -> None:
    """The calls of the tests of tests/emu."""
    for name in TESTS:
        test = REPO / "tests" / "emu" / f"{name}.py"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not hardware", str(test)]
        module = (folder / f"{name}.ir").resolve()
        record = ["-p", "device.recorder", "--record", str(module)]
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [*command, *record], cwd=REPO, check=True, env=os.environ | {"PYTHONPATH": path}
        )
        build(module)


def xpuc(*arguments: object) -> str:
    """What a command of xpuc prints."""
    command = [sys.executable, "-m", "xpuc", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def plan(out: Path) -> dict[str, Any]:
    """What is measured, in this order: what matters most first, as the time may not do for all."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.strip()
    return {"about": {"revision": revision}, "limit_s": LIMIT_S, "parts": list(_parts(out))}


def _parts(out: Path) -> Iterator[dict[str, Any]]:
    able = {"exit_codes": [0, 1], "expected": {"can_run_cuda": True}}  # it cannot compile
    yield part("doctor", 20, "xpuc", "doctor", "--json") | able
    yield part("kernels", 60, "python", "vectors.py", KERNELS, MODEL)
    if (out / SMOLLM2).is_dir():
        expected = json.loads((out / "smollm2.json").read_text())
        yield part("smollm2", 40, "xpuc", *answer(SMOLLM2)) | {"expected": expected}
    sizes = {"generated": "64", "prompts": "512,2048", "depths": "0,2048", "batches": "1,8,16"}
    yield from benchmarks(MODEL, **sizes)
    if (out / TUNE).is_file():
        found = ("--results", "tune.jsonl", "--minutes", "1", "--json")
        yield part("tune", 90, "xpuc", "tune", "--replay", TUNE, *found)


def benchmarks(
    model: str, *, generated: str, prompts: str, depths: str, batches: str, rounds: str = "3"
) -> Iterator[dict[str, Any]]:
    """The parts that measure speed, with the names of xpuc bench's options."""

    def bench(name: str, limit_s: int, *options: str) -> dict[str, Any]:
        return part(name, limit_s, "xpuc", "bench", model, *options, "--json")

    decode = ("-p", "0", "-n", generated)
    yield bench("decode", 90, *decode, "-b", batches, "-d", depths, "-r", rounds)
    yield bench("prefill", 60, "-p", prompts, "-n", "0", "-r", rounds)
    yield bench(
        "kernel_table",
        60,
        "-p",
        prompts.partition(",")[0],
        "-n",
        generated,
        "-r",
        rounds,
        "--profile",
    )
    yield bench("no_pipeline", 45, *decode, "-r", rounds, "--no-pipeline")
    yield bench("no_graphs", 45, *decode, "-r", rounds, "--no-graphs")


def part(name: str, limit_s: int, *command: object) -> dict[str, Any]:
    """A part of the plan."""
    return {"name": name, "limit_s": limit_s, "command": list(map(str, command))}


def finish(out: Path, plan: dict[str, Any]) -> None:
    """The scripts, and the plan they follow."""
    for name in SCRIPTS:
        shutil.copy(HERE / name, out / name)
    (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")


if __name__ == "__main__":
    main()
