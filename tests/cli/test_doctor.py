"""`xpuc doctor`: what is there, what is missing, and the command that adds it."""

import re
import tomllib
from pathlib import Path

import pytest
from cli_runs import invoke

from xpuc.cli import diagnosis, requirements
from xpuc.cli.requirements import Requirement, accepts
from xpuc.errors import ArtifactError, XpucError
from xpuc.runtime import nvidia

CORE = Requirement("numpy", ">=1.26", "", "2.0")
COMPILER = Requirement("apache-tvm", "==0.27.0.post1", "compile", "0.27.0.post1")
OPTIONAL = {"lmdb": "store", "llguidance": "grammar", "cloudpickle": "tune"}
ROOT = Path(__file__).parent.parent.parent
PEER = Requirement("xllamacpp", "", "peer", None)


def no_gpu():
    raise ArtifactError("NVIDIA's driver finds no GPU", "check nvidia-smi")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with the given packages, no GPU, and no look at the compilers."""
    monkeypatch.setenv("XPUC_CACHE", str(tmp_path))
    monkeypatch.setattr(diagnosis, "_compiler", lambda: iter(()))
    fine = diagnosis.Finding("CUDA compiler", "ok", "NVRTC", "", "compile cuda")
    monkeypatch.setattr(diagnosis, "_cuda_compiler", lambda: fine)
    monkeypatch.setattr(nvidia, "first_gpu", no_gpu)

    def have(*packages):
        monkeypatch.setattr(requirements, "declared", lambda: iter(packages))

    return have


def test_a_machine_that_can_do_all(machine):
    machine(CORE, COMPILER, PEER)
    done = invoke("doctor")
    assert done.code == 0
    assert done.out.splitlines()[-2:] == [
        "run: yes; compile: yes (--target llvm)",
        "run: no; compile: yes (--target cuda)",
    ]


def test_a_deployment_machine_runs_but_does_not_compile(machine):
    machine(CORE, Requirement("apache-tvm", "==0.27.0.post1", "compile", None))
    done = invoke("doctor")
    assert done.code == 1
    assert "  apache-tvm  pip install 'xpuc[compile]'" in done.out.splitlines()
    assert done.out.splitlines()[-2:] == [
        "run: yes; compile: no (--target llvm)",
        "run: no; compile: no (--target cuda)",
    ]


def rows(done):
    """Mark, subject and what was found, of each line."""
    return [re.split("  +", line) for line in done.out.splitlines()]


def test_a_gpu_is_described_and_what_is_missing_for_one_is_a_note(machine, monkeypatch):
    machine(CORE, COMPILER)
    done = invoke("doctor")
    assert ["note", "GPU", "NVIDIA's driver finds no GPU"] in rows(done)
    assert done.code == 0
    found = nvidia.GpuFacts("NVIDIA H200", "9.0", "13.0", 140 << 30, 141 << 30)
    monkeypatch.setattr(nvidia, "first_gpu", lambda: found)
    done = invoke("doctor")
    said = "compute capability 9.0, 140.0 GiB free of 141.0 GiB, driver of CUDA 13.0"
    assert ["ok", "GPU", f"NVIDIA H200, {said}"] in rows(done)
    assert done.out.splitlines()[-1] == "run: yes; compile: yes (--target cuda)"


@pytest.mark.slow
def test_the_compiler_for_gpus_is_named_or_how_to_get_it(monkeypatch):
    from xpuc.codegen.cuda import device_code

    found = diagnosis._cuda_compiler()
    assert found.mark == "ok"
    assert found.found.startswith("NVRTC 13.")
    assert found.found.endswith("sm_80 sm_86 sm_89 sm_90 sm_90a sm_100 sm_120")

    def none():
        raise XpucError("no CUDA compiler", "pip install 'xpuc[cuda]'")

    monkeypatch.setattr(device_code, "find_compiler", none)
    found = diagnosis._cuda_compiler()
    assert (found.mark, found.found, found.fix) == (
        "note", "no CUDA compiler", "pip install 'xpuc[cuda]'",
    )  # fmt: skip


def test_a_package_outside_its_pins_is_missing(machine):
    machine(Requirement("apache-tvm-ffi", ">=0.1.14.post0,<0.1.15", "", "0.1.15.post1"), COMPILER)
    found = invoke("doctor", "--json").json
    (row,) = [each for each in found["findings"] if each["subject"] == "apache-tvm-ffi"]
    assert row["mark"] == "missing"
    assert "0.1.15.post1" in row["found"]
    assert not found["can_run"]
    assert not found["can_compile"]


def test_a_missing_peer_is_a_note(machine):
    machine(CORE, COMPILER, PEER)
    done = invoke("doctor", "--json")
    (row,) = [each for each in done.json["findings"] if each["subject"] == "xllamacpp"]
    assert (row["mark"], row["fix"]) == ("note", "pip install xllamacpp")
    assert done.code == 0


def test_what_is_optional_is_listed_with_its_use(machine):
    missing = [Requirement(name, ">=1", extra, None) for name, extra in OPTIONAL.items()]
    machine(CORE, COMPILER, *missing)
    done = invoke("doctor", "--json")
    assert done.code == 0
    rows = {each["subject"]: each for each in done.json["findings"]}
    for name, extra in OPTIONAL.items():
        assert rows[name]["mark"] == "note"
        assert rows[name]["fix"] == f"pip install 'xpuc[{extra}]'"
    assert rows["lmdb"]["found"].endswith(", for K/V that outlives the process: --store)")
    machine(CORE, COMPILER, Requirement("lmdb", ">=1.4", "store", "3.0.0"))
    assert "ok    lmdb" in invoke("doctor").out


def test_every_extra_of_the_project_has_a_use():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert diagnosis.USES.keys() == {"", *project["optional-dependencies"]}


@pytest.mark.slow
def test_this_machine_can_compile_the_tests():
    findings = {each["subject"]: each for each in invoke("doctor", "--json").json["findings"]}
    assert findings["LLVM target"]["mark"] == "ok"
    assert findings["C compiler"]["mark"] == "ok"
    assert findings["apache-tvm"]["mark"] == "ok"


@pytest.mark.slow
def test_without_a_c_compiler_it_names_one(monkeypatch):
    monkeypatch.setattr("xpuc.cli.diagnosis.find_linker", lambda: None)
    done = invoke("doctor")
    assert "  C compiler  apt install gcc, or pip install ziglang" in done.out.splitlines()
    assert done.code == 1


def test_the_pins_are_those_of_the_project():
    found = list(requirements.declared())
    pins = {each.name: each for each in found}
    assert len(pins) == len(found)
    assert pins["apache-tvm-ffi"].is_met
    assert "<0.1.15" in pins["apache-tvm-ffi"].pins
    assert pins["apache-tvm"].extra == "compile"
    assert pins["xllamacpp"].extra == "peer"


@pytest.mark.parametrize(
    ("pins", "found", "met"),
    [
        ("", "1", True),
        (">=1.26", "1.26", True),
        (">=1.26", "1.26.0", True),
        (">=1.26", "2.0", True),
        (">=1.26", "1.9", False),
        (">=0.1.14.post0,<0.1.15", "0.1.14.post1", True),
        (">=0.1.14.post0,<0.1.15", "0.1.14", False),
        (">=0.1.14.post0,<0.1.15", "0.1.15", False),
        (">=0.1.14.post0,<0.1.15", "0.1.15.post2", False),
        ("==0.27.0.post1", "0.27.0.post1", True),
        ("==0.27.0.post1", "0.27.0", False),
        ("!=3", "3", False),
        (">2,<=4", "4", True),
        (">2,<=4", "2", False),
        (">=1.0", "1.0+cpu", True),
    ],
)
def test_pins(pins, found, met):
    assert accepts(pins, found) is met
