"""Every example of docs/api.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeCodec, FakeModel

import xpuc
from xpuc.runtime import async_engine
from xpuc.runtime.engine import Engine

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"


class Typewriter(FakeCodec):
    """A token for each character of ASCII that can be printed."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces = [b"", *(bytes([code]) for code in range(32, 127)), b"\n"]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [self._pieces.index(bytes([code])) for code in text.encode("ascii")]


def fake_load(path: str, **options: Any) -> Engine:
    assert path == "model.xpuc"
    template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    model = FakeModel(max_context=400, n_blocks=500, n_vocab=97)
    return Engine(model, Typewriter(), chat_template=template)


def test_every_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They build on each other, so they run in one namespace; each prints something."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(xpuc, "load", fake_load, raising=False)
    monkeypatch.setattr(async_engine, "load", fake_load)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 10
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        assert capsys.readouterr().out.strip() or "print" not in block, block
    assert names["engine"].kv.n_used == 0
