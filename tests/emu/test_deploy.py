"""A machine that only runs artifacts: xpuc's wheel without a compiler, on every CPython there is,
and what it says of NVIDIA's libraries that are missing, too old, or find no GPU."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from emu import compiler
from venvs import Venv, build_wheel, interpreters, make_venv

import xpuc

pytestmark = pytest.mark.slow

PROMPT = [3, 14, 15, 92, 6, 5, 35, 8]
ANSWER = (
    "import json, sys, xpuc\n"
    "with xpuc.load(sys.argv[1], chunk_budget_ms=float('inf')) as engine:\n"
    f"    ids = engine.generate({PROMPT}, max_tokens=8, temperature=0, ignore_eos=True).ids\n"
    "print(json.dumps([list(sys.version_info[:2]), ids, sorted(sys.modules)]))\n"
)
PYTHONS = interpreters()


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Venv]:
    """venv(version): one of this CPython, made once, with what an artifact needs to run."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    made: dict[str, Venv] = {}

    def of(version: str) -> Venv:
        if version not in made:
            folder = tmp_path_factory.mktemp(f"python{version}")
            made[version] = make_venv(folder, str(wheel), PYTHONS[version])
        return made[version]

    return of


@pytest.fixture(scope="module")
def artifact(on_gpu: Callable[[str], Path]) -> Path:
    return on_gpu("llama")


@pytest.mark.parametrize("version", PYTHONS)
def test_an_artifact_runs_without_the_compiler(
    version: str, venv: Callable[[str], Venv], artifact: Path
) -> None:
    with xpuc.load(artifact, chunk_budget_ms=math.inf) as engine:
        expected = engine.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).ids
    machine, folder = venv(version), str(compiler.driver_folder())
    assert machine.importable(["tvm", "gguf", "torch", "nvidia", "xpuc"]) == ["xpuc"]
    said = machine("python", "-c", ANSWER, artifact, LD_LIBRARY_PATH=folder)
    found, ids, modules = json.loads(said)
    assert ".".join(map(str, found)) == version
    assert ids == expected
    assert "xpuc.codegen" not in modules


# What the libraries of a machine answer: C functions by name.
DRIVER = {"cuInit": 0, "cuDriverGetVersion": 13000, "cuDeviceGetCount": 1}
REFUSED = {
    "no_driver": (None, "NVIDIA's driver (libcuda.so.1) is not on this machine"),
    "no_gpu": (DRIVER | {"cuInit": 100}, "NVIDIA's driver finds no GPU"),
    "broken": (DRIVER | {"cuInit": 803}, "NVIDIA's driver does not start (CUDA error 803)"),
    "hidden": (
        DRIVER | {"cuDeviceGetCount": 0},
        "NVIDIA's driver finds no GPU (CUDA_VISIBLE_DEVICES is '')",
    ),
    "old": (
        DRIVER | {"cuDriverGetVersion": 12040},
        "NVIDIA's driver is of CUDA 12.4, and CUDA 13 is needed",
    ),
    "no_runtime": (DRIVER, "CUDA's runtime library (libcudart.so.13) is not on this machine"),
}


def without_runtime(folder: Path) -> None:
    """A folder for LD_LIBRARY_PATH that hides the libcudart the system may have."""
    folder.mkdir()
    (folder / "libcudart.so.13").touch()


def stub_driver(folder: Path, answers: dict[str, int]) -> None:
    """A libcuda.so.1 that answers so."""
    lines = [f"int cuInit(unsigned flags) {{ return {answers['cuInit']}; }}"] + [
        f"int {name}(int *value) {{ *value = {value}; return 0; }}"
        for name, value in answers.items()
        if name != "cuInit"
    ]
    without_runtime(folder)
    (folder / "stub.c").write_text("\n".join(lines) + "\n")
    out = ["-o", str(folder / "libcuda.so.1"), str(folder / "stub.c")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *out], check=True)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_named(
    case: str, venv: Callable[[str], Venv], artifact: Path, tmp_path: Path
) -> None:
    answers, message = REFUSED[case]
    folder = tmp_path / "lib"
    if answers is not None:
        stub_driver(folder, answers)
    machine = venv(next(iter(PYTHONS)))
    environment = {"CUDA_HOME": str(tmp_path), "LD_LIBRARY_PATH": str(folder)}
    if case == "hidden":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = machine.start("xpuc", "run", artifact, "-p", "a", "--raw", **environment)
    error, hint = done.stderr.splitlines()[-2:]
    assert done.returncode == 2
    assert error.startswith(f"error: {message}")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("place", ["toolkit", "wheel", "torch"])
def test_cudas_runtime_library_is_found_in(
    place: str, venv: Callable[[str], Venv], artifact: Path, tmp_path: Path
) -> None:
    """Where a CUDA toolkit, NVIDIA's wheel or torch's has it, and the system does not."""
    driver, runtime = (compiler.driver_folder() / f for f in ("libcuda.so.1", "libcudart.so.13"))
    system = tmp_path / "system"
    without_runtime(system)
    (system / driver.name).symlink_to(driver)
    to = {
        "toolkit": tmp_path / "lib64" / runtime.name,
        "wheel": tmp_path / "nvidia" / "cu13" / "lib" / runtime.name,
        "torch": tmp_path / "torch" / "lib" / "libcudart-0123abcd.so.13",
    }[place]
    to.parent.mkdir(parents=True)
    to.symlink_to(runtime)
    (to.parent.parent / "__init__.py").touch()
    machine = venv(next(iter(PYTHONS)))
    environment = {"LD_LIBRARY_PATH": str(system), "PYTHONPATH": str(tmp_path)}
    environment["CUDA_HOME"] = str(tmp_path if place == "toolkit" else system)
    code = "import xpuc.runtime.nvidia as n; print(n.first_gpu().name)"
    assert machine("python", "-c", code, **environment) == "emulated sm_90a\n"
