"""The rules of the house that a test can hold."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "xpuc",
    "frontend",
    "ir",
    "passes",
    "codegen",
    "schedules",
    "runtime",
    "tune_db",
    "tests",
)
SOURCES = sorted({p.resolve() for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")})


def test_files_stay_readable_in_one_sitting():
    long = {
        str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long, f"files over 400 lines: {long}"


def test_every_architecture_has_a_row_of_tests():
    from tiny_models import TINY

    files = {p.stem for p in (ROOT / "frontend" / "arch").glob("*.py")} - {"__init__", "blocks"}
    assert files <= {row.arch for row in TINY.values()}


def test_every_weight_format_has_its_files():
    from xpuc.ir.formats import formats
    from xpuc.schedules.packed import FORMATS

    decoders = (ROOT / "schedules" / "llvm" / "layouts").glob("[!_]*.py")
    assert set(FORMATS) == set(formats()) == {path.stem.upper() for path in decoders}


@pytest.mark.parametrize("module", ["xpuc", "xpuc.cli"])
def test_importing_the_front_door_imports_nothing_heavy(module):
    heavy = ("tvm", "tvm_ffi", "numpy", "tokenizers", "gguf", "torch", "jinja2")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_runtime_imports_no_compiler():
    code = (
        "import sys, xpuc.runtime.engine, xpuc.runtime.model\n"
        "import xpuc.runtime.tokenizer, xpuc.runtime.chat\n"
        "bad = ['tvm', 'gguf', 'torch']\n"
        "bad += [f'xpuc.{n}' for n in ('frontend', 'ir', 'passes', 'codegen', 'schedules')]\n"
        "print([m for m in bad if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_folders_are_not_importable_by_their_bare_names():
    for name in ("frontend", "passes", "codegen", "schedules", "tune_db"):
        code = f"import {name}"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
        )
        assert "ModuleNotFoundError" in done.stderr, name


def test_the_emulated_gpu_has_a_process_of_its_own():
    """It preloads a fake CUDA driver: a plain pytest leaves it alone, `make test` runs it."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "emu" in options["norecursedirs"]
    makefile = (ROOT / "Makefile").read_text()
    assert 'pytest -m "not hardware" tests/emu $(addprefix --ignore=,$(EMU_MODELS)); ' in makefile
    assert 'pytest -m "not hardware" $(EMU_MODELS); emu=$$?' in makefile
    code = "import tvm, emu.fake_driver as f; f.load()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "tests/emu needs a pytest process of its own" in done.stderr
