"""What commands are given: an artifact and its engine that are made up, a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import write_manifest
from fake_model import FakeCodec, FakeModel

from xpuc.runtime.engine import Engine

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}.{% endfor %}"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A manifest alone: for a command whose `load` is replaced."""
    return write_manifest(tmp_path / "m.xpuc")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine that `load` gives; with which options it was asked for is added to `asked`."""
    made: Any = Engine(FakeModel(), FakeCodec(), chat_template=TEMPLATE)
    made.asked = []

    def load(path: Path, **options: Any) -> Engine:
        made.asked.append(options)
        return made

    monkeypatch.setattr("xpuc.runtime.engine.load", load)
    return made


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    """A tiny model of Q8_0 weights."""
    return tiny_model("llama", weights="Q8_0")
