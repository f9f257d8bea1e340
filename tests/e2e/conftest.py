"""Artifacts compiled once for all tests that ask for the same model and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernel_objects import KernelObjects, sharing

from xpuc.codegen.compile import Options, compile_model
from xpuc.runtime.model import Model, load_model


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """compiled(gguf, **options): its artifact. `plainly`: without LLVM's optimisations."""
    folder = tmp_path_factory.mktemp("compiled")
    kernels = {}
    for plainly, name in ((False, "optimised"), (True, "plain")):
        (folder / name).mkdir()
        kernels[plainly] = KernelObjects(folder / name, plainly=plainly)
    artifacts: dict[tuple[Path, Options, bool], Path] = {}

    def artifact_of(gguf: Path, *, plainly: bool = False, **options: Any) -> Path:
        key = (gguf, Options(**options), plainly)
        if key not in artifacts:
            out = folder / f"{gguf.stem}-{len(artifacts)}.xpuc"
            with sharing(kernels[plainly]):
                artifacts[key] = compile_model(gguf, out=out, options=key[1]).path
        return artifacts[key]

    return artifact_of


@pytest.fixture(scope="session")
def loaded(compiled: Callable[..., Path]) -> Callable[..., Model]:
    """loaded(gguf, **options): the model of `compiled`, with a K/V pool of its own."""
    return lambda gguf, **options: load_model(compiled(gguf, **options))
