"""A real artifact to be measured, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def artifact(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny model with windows and quantised weights."""
    from kernel_objects import KernelObjects, sharing  # imports tvm

    from xpuc.codegen.compile import Options, compile_model

    folder = tmp_path_factory.mktemp("profiled")
    with sharing(KernelObjects(folder, plainly=True)):
        return compile_model(
            tiny_model("gemma3", weights="Q4_0"), out=folder / "m.xpuc",
            options=Options(ctx=128, max_batch=2, max_chunk=32),
        ).path  # fmt: skip
