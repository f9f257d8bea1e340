"""Targets: a CPU LLVM knows has its features; a name it does not know is refused."""

from __future__ import annotations

import pytest

from xpuc.codegen import target
from xpuc.codegen.target import resolve
from xpuc.errors import UnsupportedError


def test_a_named_cpu_has_its_features() -> None:
    machine = resolve("llvm", "x86-64-v3")
    assert machine.facts.cpu == "x86-64-v3"
    assert {"avx2", "fma", "f16c"} <= machine.facts.features
    assert "avx512f" not in machine.facts.features


def test_an_unknown_cpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnsupportedError, match="unknown CPU: 'znver33'") as caught:
        resolve("llvm", "znver33")
    assert "did you mean 'znver3'?" in caught.value.hint


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown target: 'lvm'"):
        resolve("lvm")


def test_a_host_that_hides_features_gets_a_plainer_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = target.cpu_features(target._llvm("x86-64-v2", "x86_64-linux-gnu"))
    monkeypatch.setattr(target, "host_features", lambda: shown)
    assert target._host_cpu("x86_64-linux-gnu") == "x86-64-v2"
