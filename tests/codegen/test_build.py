"""Linking: the command is found, runs however many words it has, and its failures are explained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tvm import IRModule, relax

from xpuc.cli import diagnosis
from xpuc.codegen import build, linker
from xpuc.codegen.kernels.activation import silu
from xpuc.codegen.target import resolve
from xpuc.errors import XpucError


def module() -> IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4, 8], "float32"))
    kernel = builder.add_func(silu(8, 4).without_attr("global_symbol"), "silu")
    with builder.function("step", [x]):
        with builder.dataflow():
            y = builder.emit(relax.call_tir(kernel, [x], [x.ty]))
            out = builder.emit_output(builder.emit(relax.call_tir(kernel, [y], [x.ty])))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.mark.parametrize("command", ["cc", "env cc"])
def test_the_linker_may_be_several_words(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    built = build.build(module(), resolve("llvm"), tmp_path / "model.so")
    assert built.path.stat().st_size > 0
    assert built.activation_bytes == {"step": 4 * 8 * 4}


def test_a_linker_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(XpucError, match="false: cannot link"):
        build.build(module(), resolve("llvm"), tmp_path / "model.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["/no/such/cc", "cc '", " "])
def test_a_linker_that_is_none_is_refused_before_any_work(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(XpucError, match=f"CC is {command}: there is no such command"):
        build.require_tools(resolve("llvm"))
    finding = diagnosis._linker()
    assert (finding.mark, finding.needed_for) == (diagnosis.GAP, "compile")


def test_without_a_compiler_ziglang_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(linker.shutil, "which", lambda name: None)
    found = {"ziglang": object()}
    monkeypatch.setattr(linker.importlib.util, "find_spec", found.get)
    assert linker.find_linker() == [sys.executable, "-m", "ziglang", "cc"]
    found.clear()
    with pytest.raises(XpucError, match="no C compiler"):
        build.build(module(), resolve("llvm"), Path("model.so"))
