"""Compiled kernels kept between compilations: tiny models share most of theirs, and LLVM is slow.

A build inside `shared` compiles each PrimFunc to an object of its own, once, and links the objects;
what is linked is what a whole build would have compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.runtime import load_static_library

LIBRARY_SYMBOLS = ("__tvm_ffi__library_ctx",)


class KernelObjects:
    """Object files of kernels by name, structure and target, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compile = tirx.build
        self.found: dict[tuple[str, int, str], Any] = {}
        self.n_built = 0

    def build(self, module: Any, target: Any = None, pipeline: Any = "default") -> Any:
        """What tvm.tirx.build gives, as static libraries that import each other in a row."""
        libraries = [
            self.library(var, function, target, pipeline)
            for var, function in module.functions_items()
        ]
        first, *rest = libraries
        for library in rest:
            first.import_module(library)
        return first

    def library(self, var: Any, function: Any, target: Any, pipeline: Any) -> Any:
        name = var.name_hint
        key = (name, tvm_ffi.structural_hash(function, map_free_vars=True), str(target))
        path = self.folder / f"{name[:60]}-{len(self.found)}.o"
        if key not in self.found:
            module = tvm.IRModule({var: function})
            self.compile(module, target=target, pipeline=pipeline).write_to_file(str(path))
            self.found[key] = path
        return load_static_library(str(self.found[key]), [name])


@contextmanager
def shared(objects: KernelObjects) -> Iterator[None]:
    """Builds inside take their kernels from `objects`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tirx, "build", objects.build)
        yield
