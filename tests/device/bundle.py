"""Make the folder that tests/device/run.sh measures on a GPU box without internet.

    python tests/device/bundle.py OUT --smollm2 SmolLM2.gguf [--tune BUNDLE] [--python 3.12]

It holds xpuc's wheel and those it needs for each CPython, artifacts compiled for GPUs (Llama 3 8B
without its weights; SmolLM2, whose weights are most of the bytes, if it is given), test vectors
of the kernels, and a plan of what to measure. --tune is a file of `xpuc tune --export`. OUT.tar.gz
is all of it, to carry. Called again, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import shapes
from device.libraries import build
from venvs import build_wheel

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
SCRIPTS = ("run.sh", "measure.py", "vectors.py", "difference.py")
MODEL, KERNELS, TUNE = "llama-3-8b.xpuc", "kernels", "tune.bundle"
SMOLLM2, EXPECTED = "smollm2.xpuc", "smollm2.json"
PROMPT, N_IDS = "The capital of France is", 16
LIMIT_S = 460  # of all parts; the whole script has 8 minutes
TESTS = (
    "test_products",
    "test_rows",
    "test_qk_prep",
    "test_attention",
    "test_int8",
    "test_matmul_hopper",
    "test_sample",
    "test_target_free",
)
_CHECKS = {0: "exactly numpy's", 1: "codes a step from numpy's", None: "UNCHECKED"}
_PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64")


def main() -> None:
    """Make it and its archive, say what they weigh and what the kernels are held to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--smollm2", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tune", type=Path, metavar="BUNDLE")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=own, metavar="3.11,3.12", help="of the box")
    parser.add_argument("--target", default="cuda -arch=sm_80,sm_90a")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    about = {"revision": revision(), "target": given.target, "python": given.python}
    begin(out, about)
    made(out / "wheels", fetch_wheels, given.python.split(","))
    made(out / MODEL, compile_llama, given.target)
    if given.smollm2 is not None:
        made(out / SMOLLM2, compile_smollm2, given.smollm2, given.target)
        made(out / EXPECTED, answer_here, given.smollm2)
    for name in TESTS:
        made(out / KERNELS / name, record_kernels, name)
    if given.tune is not None:
        shutil.copyfile(given.tune, out / TUNE)
    finish(out, {"about": about, "limit_s": LIMIT_S, "parts": list(_parts(out))})
    archive = Path(shutil.make_archive(str(out), "gztar", out.parent, out.name))
    for each in [*sorted(out.iterdir()), out, archive]:
        sys.stdout.write(f"{bytes_of(each) / 1e6:8.1f} MB  {each.name}\n")
    for check, kernels in sorted(checks(out / KERNELS).items()):
        sys.stdout.write(f"{len(kernels):5} calls of {len(set(kernels))} kernels: {check}\n")


def begin(out: Path, about: dict[str, str]) -> None:
    """A new bundle; or one of the same revision and options, which was stopped."""
    note = out / "about.json"
    if not out.exists():
        out.mkdir(parents=True)
        note.write_text(json.dumps(about))
    elif not note.exists() or json.loads(note.read_text()) != about:
        raise SystemExit(f"{out} is no bundle of {about}: name a new folder")


def made(path: Path, make: Callable[..., object], *arguments: object) -> None:
    """A part of the bundle by make(path, ...), unless it is there; never half of it."""
    if path.exists():
        return
    partial = path.parent / "partial" / path.name
    shutil.rmtree(partial.parent, ignore_errors=True)
    partial.parent.mkdir(parents=True)
    make(partial, *arguments)
    partial.rename(path)
    partial.parent.rmdir()


def checks(kernels: Path) -> dict[str, list[str]]:
    """What results are held to by numpy, as the widest tolerance of a call says: the kernels of
    those calls."""
    found: dict[str, list[str]] = {}
    for path in sorted(kernels.rglob("*.json")):
        for case in json.loads(path.read_text()):
            widest = max((each["tolerance"] for each in case["expected"]), default=None)
            kernel = f"{path.parent.name} {case['function']}"
            found.setdefault(_CHECKS.get(widest, f"within {widest} of numpy's"), []).append(kernel)
    return found


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
        needed = (str(wheel), "nvidia-cuda-runtime==13.0.*", "pip")
        subprocess.run([*command, *needed], check=True)


def compile_llama(path: Path, target: str) -> None:
    """Llama 3 8B in Q4_K_M, without its weights."""
    checkpoint = path.with_suffix(".gguf")
    shapes.write(shapes.SHAPES["llama-3-8b"], "Llama 3 8B", checkpoint)
    sizes = ("--ctx", "4096", "--max-batch", "16")
    xpuc("compile", checkpoint, "-o", path, "--target", target, "--synthetic", 1, *sizes)
    checkpoint.unlink()


def compile_smollm2(path: Path, checkpoint: Path, *target: str) -> None:
    """For GPUs, or this machine's CPU."""
    options = ("--target", *target) if target else ()
    xpuc("compile", checkpoint, "-o", path, "--ctx", "512", "--max-batch", "1", *options)


def answer_here(path: Path, checkpoint: Path) -> None:
    """What the CPU answers, to compare with."""
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch) / SMOLLM2
        compile_smollm2(here, checkpoint)
        path.write_text(json.dumps({"ids": json.loads(xpuc(*answer(here)))["ids"]}))


def answer(artifact: Path | str) -> list[Any]:
    """The command whose answers are compared."""
    return ["run", artifact, "-p", PROMPT, "--raw", "-n", N_IDS, "--temp", 0, "--json"]


def record_kernels(folder: Path, name: str) -> None:
    """The calls of a test of tests/emu."""
    test = REPO / "tests" / "emu" / f"{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not hardware", str(test)]
    module = (folder / "kernels.ir").resolve()
    record = ["-p", "device.recorder", "--record", str(module)]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([*command, *record], cwd=REPO, check=True, env=os.environ | {"PYTHONPATH": path})
    if not module.exists():
        raise SystemExit(
            f"{test} records no kernel: it gives emu.device.run none that it can build"
        )
    build(module)


def xpuc(*arguments: object) -> str:
    """What a command of xpuc prints."""
    command = [sys.executable, "-m", "xpuc", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def revision() -> str:
    """Of xpuc, by git."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _parts(out: Path) -> Iterator[dict[str, Any]]:
    able = {"exit_codes": [0, 1], "expected": {"can_run_cuda": True}}  # it cannot compile
    sizes = {"generated": "64", "prompts": "512,2048", "depths": "0,2048", "batches": "1,8,16"}
    decode, *others = benchmarks(MODEL, **sizes)
    yield part("doctor", 20, "xpuc", "doctor", "--json") | able
    yield decode  # before what might leave the GPU in need of a reset
    yield part("kernels", 90, "python", "vectors.py", KERNELS, MODEL, 75)
    if (out / EXPECTED).is_file():
        expected = json.loads((out / EXPECTED).read_text())
        yield part("smollm2", 40, "xpuc", *answer(SMOLLM2)) | {"expected": expected}
    yield from others
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
    for depth in depths.split(","):  # apart: a depth is filled by the kernels of prompts
        name = "decode" if depth == "0" else f"decode_at_{depth}"
        yield bench(name, 60, *decode, "-b", batches, "-d", depth, "-r", rounds)
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
    """The scripts, and the plan they follow: what matters most first, as the time may not do."""
    for name in SCRIPTS:
        shutil.copy(HERE / name, out / name)
    (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")


if __name__ == "__main__":
    main()
