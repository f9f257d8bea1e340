"""The library of recorded kernels, compiled in a process without the emulated GPU's driver, whose
functions NVIDIA's compiler would take for its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm

from xpuc.codegen import cuda
from xpuc.codegen.linker import link, require_linker
from xpuc.codegen.target import resolve

ARCHS = ("sm_90a",)  # what tests/emu builds kernels for


def build(module: Path, compiler: Any = None, archs: Sequence[str] = ARCHS) -> Path:
    """The library of a module that recorder.py wrote, in its place."""
    target = resolve(f"cuda -arch={','.join(archs)}").tvm
    kernels = tvm.ir.load_json(module.read_text())
    with target, cuda.compiling(archs, compiler):
        built = tvm.compile(kernels, target=target, tir_pipeline=cuda.PIPELINE)
    library = module.with_suffix(".so")
    built.export_library(
        str(library),
        fcompile=lambda output, objects, **_: link(require_linker(), output, objects),
    )
    module.unlink()
    return library
