"""Compiled kernels kept between compilations: LLVM takes most of one, and models share kernels.

A build inside `sharing` compiles each kernel to an object of its own, once, and links the objects:
what it links is what a build of the whole module compiles.
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


class KernelObjects:
    """Object files in `folder`, by kernel (its name and its structure) and target.

    `plainly`: compiled without LLVM's optimisations, in half the time.
    """

    def __init__(self, folder: Path, *, plainly: bool = False) -> None:
        self.folder, self.plainly = folder, plainly
        self.compile = tirx.build
        self.paths: dict[tuple[str, int, str], Path] = {}

    def build(self, module: Any, target: Any, pipeline: Any = "default") -> Any:
        """As tirx.build; the result is static libraries, the first of which imports the rest."""
        if self.plainly:
            target = tvm.target.Target({**target.export(), "opt-level": 0})
        libraries = [
            self.library(var, function, target, pipeline)
            for var, function in module.functions_items()
        ]
        for library in libraries[1:]:
            libraries[0].import_module(library)
        return libraries[0]

    def library(self, var: Any, function: Any, target: Any, pipeline: Any) -> Any:
        name = var.name_hint
        key = (name, tvm_ffi.structural_hash(function, map_free_vars=True), str(target))
        if key not in self.paths:
            path = self.folder / f"{len(self.paths)}.o"
            module = tvm.IRModule({var: function})
            self.compile(module, target=target, pipeline=pipeline).write_to_file(str(path))
            self.paths[key] = path
        return load_static_library(str(self.paths[key]), [name])


@contextmanager
def sharing(objects: KernelObjects) -> Iterator[None]:
    """Builds inside take their kernels from `objects`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tirx, "build", objects.build)
        yield
