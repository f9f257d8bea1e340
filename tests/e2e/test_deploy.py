"""The wheel in clean venvs: without the compiler it runs an artifact, with it it makes one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from venvs import REPO, Venv, build_wheel, make_venv

import xpuc

pytestmark = pytest.mark.slow

PROMPT = "the cat and the hat"
RUN = ("-p", PROMPT, "--raw", "-n", "12", "--temp", "0", "--ignore-eos", "--json")
SIZES = {"ctx": 128, "max_batch": 1, "max_chunk": 32}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def deployed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A machine that only runs models."""
    return make_venv(tmp_path_factory.mktemp("deployed"), str(wheel))


@pytest.fixture(scope="module")
def compiling(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A machine that compiles models, for GPUs too."""
    return make_venv(tmp_path_factory.mktemp("compiling"), f"{wheel}[cuda]")


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path], checkpoint: Path) -> Path:
    return compiled(checkpoint, **SIZES)


@pytest.fixture(scope="module")
def expected(artifact: Path) -> list[int]:
    """The ids this process generates from PROMPT."""
    engine = xpuc.load(artifact)
    return engine.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True).ids


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """say(line) is seen in the test's output, whatever pytest captures."""

    def write(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return write


def test_the_wheel_holds_the_package_and_no_links(wheel):
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[1] for name in names if name.startswith("xpuc/")}
    assert {"cli", "codegen", "frontend", "runtime", "schedules", "py.typed"} <= folders
    sources = {
        f"xpuc/{path.relative_to(REPO / 'xpuc')}"
        for folder in ("cli", "codegen", "frontend", "ir", "passes", "runtime", "schedules")
        for path in (REPO / "xpuc" / folder).rglob("*.py")
    }
    assert sources <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "frontend/"))]


def test_a_machine_without_the_compiler_runs_an_artifact(deployed, artifact, expected, say):
    assert deployed.importable(["tvm", "gguf", "torch", "transformers", "xpuc"]) == ["xpuc"]
    moved = shutil.copytree(artifact, deployed.cwd / "my model.xpuc")
    found = json.loads(deployed("xpuc", "run", moved.name, *RUN))
    assert found["ids"] == expected
    size = deployed.installed_bytes() / 2**20
    say(f"installed to run an artifact: {size:.0f} MiB in site-packages, without pip")
    assert size < 250


def test_it_says_what_compiling_needs(deployed, checkpoint):
    done = deployed.start("xpuc", "compile", checkpoint, "-o", "x.xpuc")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: the compiler needs apache-tvm, which is not installed",
        "hint: pip install 'xpuc[compile]'",
    ]
    assert not (deployed.cwd / "x.xpuc").exists()


def test_python_runs_it_too(deployed, artifact, expected):
    code = (
        "import sys, xpuc; engine = xpuc.load(sys.argv[1]);"
        f"print(engine.generate({PROMPT!r}, max_tokens=12, temperature=0, ignore_eos=True).ids)"
    )
    assert json.loads(deployed("python", "-c", code, artifact)) == expected


MEASURE = """
import atexit, re, resource, sys
from pathlib import Path

def say():
    own = resource.getrusage(resource.RUSAGE_SELF)
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
    print(own.ru_utime + own.ru_stime, int(peak[1]) / 1024, file=sys.stderr)

atexit.register(say)
from xpuc.cli import main
main(sys.argv[1:])
"""


@pytest.mark.model
def test_a_run_is_light(deployed, compiled, smollm2_gguf, say):
    """CPU time of a whole `xpuc run` of one token, and its peak against the memory statement."""
    artifact = compiled(smollm2_gguf)
    statement = json.loads(deployed("xpuc", "inspect", artifact, "--json"))["memory"]
    run = ("run", artifact, "-p", "Hello", "-n", 1, "--temp", 0, "--json")
    deployed("xpuc", *run)  # the file is in memory and Python's own are compiled
    done = deployed.start("python", "-c", MEASURE, *run)
    assert len(json.loads(done.stdout)["ids"]) == 1
    seconds, peak = map(float, done.stderr.split())
    besides = (statement["total"] - statement["kv_pool"]) / 2**20
    say(
        f"SmolLM2 to its first token: {seconds:.2f} s of CPU time, peak {peak:.0f} MiB"
        f" (statement without K/V: {besides:.0f} MiB)"
    )
    assert statement["weights"] / 2**20 < peak < besides * 1.05
    assert seconds < 3


def test_the_wheel_with_its_compiler_compiles_and_runs(compiling, checkpoint, expected, artifact):
    copy = shutil.copy(checkpoint, compiling.cwd / "model.gguf")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    compiling("xpuc", "compile", Path(copy).name, "-o", "model.xpuc", *sizes)
    assert json.loads(compiling("xpuc", "run", "model.xpuc", *RUN))["ids"] == expected
    made, ours = (files_of(path) for path in (compiling.cwd / "model.xpuc", artifact))
    assert made.keys() == ours.keys()
    assert made["weights.safetensors"] == ours["weights.safetensors"]
    assert made["tokenizer.json"] == ours["tokenizer.json"]


def test_it_compiles_for_gpus_without_a_cuda_toolkit(compiling, checkpoint):
    """With what PyPI has and a C compiler: no nvcc, no driver, no GPU."""
    tools = compiling.cwd / "tools"
    tools.mkdir()
    for name in ("cc", "ld", "as"):
        (tools / name).symlink_to(shutil.which(name))
    alone = {"PATH": str(tools), "CUDACXX": "", "CUDA_HOME": str(tools), "CUDA_PATH": str(tools)}
    said = compiling(
        "xpuc", "compile", checkpoint, "--target", "cuda -arch=sm_90a", "--ctx", 128, "--json",
        "--max-batch", 1, "-o", "gpu.xpuc", **alone,
    )  # fmt: skip
    assert json.loads(said)["target"]["kind"] == "cuda"
    manifest = json.loads((compiling.cwd / "gpu.xpuc" / "manifest.json").read_text())
    device = manifest["decisions"]["device"]
    assert device["compiler"].startswith("NVRTC 13.0")
    assert device["fatbin_bytes"] > 0
    assert {kernel["arch"] for kernel in device["kernels"]} == {"sm_90a"}


def files_of(artifact: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())["files"]
    return facts
