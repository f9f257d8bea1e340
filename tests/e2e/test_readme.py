"""What README.md and docs/ tell a reader to type is what works."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import models
import numpy as np
import pytest
from cli_runs import invoke

from xpuc.artifact import (
    CHAT_TEMPLATE,
    CUDA_RUNTIME,
    LIBRARY,
    MANIFEST,
    RUNTIME,
    TOKENIZER,
    WEIGHTS,
    EntryPoint,
    KvLayout,
    Manifest,
    Plane,
)
from xpuc.cli import COMMANDS, main

REPO = Path(__file__).parent.parent.parent
README = REPO / "README.md"
PAGES = [README, REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
BIN = "BIN"  # stands for .venv/bin in the Makefile's commands


def page_names() -> list[str]:
    return [str(page.relative_to(REPO)) for page in PAGES]


def shell_lines(text: str) -> Iterator[str]:
    """Lines of indented and of plainly fenced blocks, and of what stands in backticks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = [body for language, body in blocks if language in ("", "sh", "bash", "console")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in fenced:
        yield from (line.strip().removeprefix("$ ") for line in block.splitlines())
    yield from (line.strip() for line in re.findall(r"^ {4}(?=\S)(.*)$", prose, re.MULTILINE))
    yield from re.findall(r"`([^`\n]+)`", prose)


def typed(text: str, program: str) -> list[list[str]]:
    """The arguments of every line that calls a program."""
    lines = (shlex.split(line, comments=True) for line in shell_lines(text) if program in line)
    return [words[1:] for words in lines if words[:1] == [program] and len(words) > 1]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def recipe(target: str, folder: Path) -> list[list[str]]:
    """The commands that `make target` would run with its models in `folder`."""
    make = ["make", "-n", "--no-print-directory", target, f"BIN={BIN}", f"MODELS={folder}"]
    lines = subprocess.run(make, cwd=REPO, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in lines.replace("\\\n", " ").splitlines()]


def run_step(step: list[str]) -> str:
    """A command of a recipe, with the interpreter of this test in place of the venv's."""
    program, *rest = step
    module = {f"{BIN}/python": [], f"{BIN}/xpuc": ["-m", "xpuc"]}[program]
    done = subprocess.run(
        [sys.executable, *module, *rest], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_say_what_to_type():
    """The finders find: else the tests below would pass on nothing."""
    text = README.read_text()
    assert {words[0] for words in typed(text, "make")} == {"demo", "test", "help"}
    assert {words[0] for words in typed(text, "xpuc")} >= {"compile", "run", "doctor"}
    assert len(python_blocks(text)) == 1


@pytest.mark.parametrize("name", page_names())
def test_links_lead_somewhere(name):
    page = REPO / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", page_names())
def test_every_command_has_its_options(name):
    """Read by the command itself: names of options and their values, not whether files exist.

    In prose a command is often but named, with an option and no MODEL.
    """
    for words in typed((REPO / name).read_text(), "xpuc"):
        if words[0].startswith("-") or "[OPTIONS]" in words:
            continue
        assert words[0] in COMMANDS, words
        command = main.get_command(click.Context(main), words[0])
        assert command is not None
        with contextlib.suppress(click.MissingParameter):
            command.make_context(words[0], words[1:])


@pytest.mark.parametrize("name", page_names())
def test_every_target_of_make_is_there(name, tmp_path):
    for words in typed((REPO / name).read_text(), "make"):
        assert recipe(words[0], tmp_path)


@pytest.mark.parametrize("name", page_names())
def test_every_extra_is_there(name):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    named = re.findall(r"xpuc\[(\w+)\]", (REPO / name).read_text())
    assert set(named) <= project["optional-dependencies"].keys()


def test_every_format_is_described():
    """The table of docs/formats.md, from the layouts themselves."""
    from xpuc.schedules.llvm.layouts import layout_of  # imports tvm
    from xpuc.schedules.packed import FORMATS

    rows = {
        f"| {name} | {layout.columns} | {layout.nbytes} | {here(layout)} | {fields(layout)} |"
        for name, layout in ((name, layout_of(name)) for name in FORMATS)
    }
    found = re.findall(
        r"^\| I?[A-Z]+\d.*$", (REPO / "docs" / "formats.md").read_text(), re.MULTILINE
    )
    assert set(found) == rows


def here(layout: Any) -> int:
    """Bytes of a block in an artifact."""
    return sum(field.per_block * np.dtype(field.dtype).itemsize for field in layout.planes)


def fields(layout: Any) -> str:
    return ", ".join(f"{f.name} {f.dtype} {f.per_block}" for f in layout.planes)


def test_every_key_of_the_manifest_is_described():
    text = (REPO / "docs" / "artifact.md").read_text()
    keys = [*(field.name for field in dataclasses.fields(Manifest)), "digest"]
    table = re.findall(r"^\| (`.*?) \| .* \|$", text, re.MULTILINE)
    assert set(keys) <= {name for row in table for name in re.findall(r"`(\w+)`", row)}
    for part in (KvLayout, EntryPoint, Plane):
        assert all(f"`{field.name}`" in text for field in dataclasses.fields(part))
    files = (MANIFEST, LIBRARY, WEIGHTS, TOKENIZER, CHAT_TEMPLATE, RUNTIME, CUDA_RUNTIME)
    assert all(f"| `{name}` |" in text for name in files)


def test_make_help_lists_every_target():
    targets = re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in listed.splitlines()] == targets


@pytest.mark.slow
def test_the_readme_s_use_from_checkpoint_to_answer(tiny_model, tmp_path, monkeypatch, capsys):
    """Its commands and its Python, on a small model.gguf."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_model("llama"), "model.gguf")
    text = README.read_text()
    for words in typed(text, "xpuc"):
        if words[0] in ("compile", "run"):
            done = invoke(*words)
            assert done.code == 0, done.err
    (block,) = python_blocks(text)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_make_demo_compiles_and_answers(tiny_model, tmp_path):
    """The steps of the recipe, on a small file of the same name."""
    fetch, *steps = recipe("demo", tmp_path)[-3:]
    assert fetch == [f"{BIN}/python", "tests/models.py", str(tmp_path), "--only", "smollm2"]
    shutil.copy(tiny_model("llama"), tmp_path / models.SMOLLM2.file)
    assert [step[1] for step in steps] == ["compile", "run"]
    assert [bool(run_step(step).strip()) for step in steps] == [True, True]


@pytest.mark.slow
@pytest.mark.model
def test_make_demo_fetches_the_model(smollm2_gguf: Path):
    fetch = recipe("demo", smollm2_gguf.parent)[-3]
    assert run_step(fetch).strip() == str(smollm2_gguf)
