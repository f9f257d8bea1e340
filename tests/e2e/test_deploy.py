"""The wheel in clean venvs: without the compiler it runs an artifact, with it it makes one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import xpuc

pytestmark = pytest.mark.slow

REPO = Path(__file__).parent.parent.parent
PROMPT = "the cat and the hat"
RUN = ("-p", PROMPT, "--raw", "-n", "12", "--temp", "0", "--ignore-eos", "--json")
SIZES = {"ctx": 128, "max_batch": 1, "max_chunk": 32}


@dataclass(frozen=True)
class Venv:
    """A virtual environment, and the folder its programs are started from."""

    folder: Path
    cwd: Path

    def __call__(self, program: str, *args: object) -> str:
        """What a program prints that must succeed."""
        done = self.start(program, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, program: str, *args: object) -> subprocess.CompletedProcess[str]:
        """A program of the venv, without what pytest adds to the environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TVM"))}
        return subprocess.run(
            [self.folder / "bin" / program, *map(str, args)],
            cwd=self.cwd, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def importable(self, names: Sequence[str]) -> list[str]:
        """Those of the packages that are there."""
        code = (
            "import importlib.util, sys;"
            "print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
        )
        return self("python", "-c", code, *names).split()

    def installed_bytes(self) -> int:
        """Bytes of what xpuc brought, without pip and what a venv starts with."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        brought = [p for p in packages.iterdir() if not p.name.startswith(("pip", "setuptools"))]
        files = [f for p in brought for f in ([p] if p.is_file() else p.rglob("*"))]
        return sum(f.stat().st_size for f in files if f.is_file() and f.suffix != ".pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it: in an environment of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*pip, str(REPO)], check=True)
    (wheel,) = folder.glob("xpuc-*.whl")
    return wheel


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Venv]:
    """venv(extra): a new venv with the wheel and this extra, or none."""

    def make(extra: str) -> Venv:
        folder = tmp_path_factory.mktemp("venv")
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        (folder / "else where").mkdir()
        made = Venv(folder / "venv", folder / "else where")
        made("python", "-m", "pip", "install", "--quiet", f"{wheel}{extra}")
        return made

    return make


@pytest.fixture(scope="module")
def deployed(venv: Callable[[str], Venv]) -> Venv:
    """A machine that only runs models."""
    return venv("")


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


def test_the_wheel_with_its_compiler_compiles_and_runs(venv, checkpoint, expected, artifact):
    machine = venv("[compile]")
    copy = shutil.copy(checkpoint, machine.cwd / "model.gguf")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    machine("xpuc", "compile", Path(copy).name, "-o", "model.xpuc", *sizes)
    assert json.loads(machine("xpuc", "run", "model.xpuc", *RUN))["ids"] == expected
    made, ours = (files_of(path) for path in (machine.cwd / "model.xpuc", artifact))
    assert made.keys() == ours.keys()
    assert made["weights.safetensors"] == ours["weights.safetensors"]
    assert made["tokenizer.json"] == ours["tokenizer.json"]


def files_of(artifact: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())["files"]
    return facts
