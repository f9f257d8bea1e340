"""Real artifacts of tiny models, compiled once, for the tests of loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def artifacts(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Of tiny models by name; of the gemma3's layers every other sees eight tokens.

    Read only: a test that damages one copies it.
    """
    from kernel_objects import KernelObjects, sharing  # imports tvm

    from xpuc.codegen.compile import Options, compile_model

    folder = tmp_path_factory.mktemp("artifacts")
    options = Options(ctx=64, max_batch=2, max_chunk=16)
    with sharing(KernelObjects(folder, plainly=True)):
        return {
            name: compile_model(tiny_model(name), out=folder / f"{name}.xpuc", options=options).path
            for name in ("llama", "qwen2", "gemma3_pattern")
        }


@pytest.fixture(scope="session")
def artifact(artifacts: dict[str, Path]) -> Path:
    """That of the llama."""
    return artifacts["llama"]
