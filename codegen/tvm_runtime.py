"""The TVM runtime library an artifact carries, and the versions it is bound to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

import tvm

from xpuc.artifact import CUDA_RUNTIME, RUNTIME
from xpuc.errors import XpucError


@dataclass(frozen=True)
class Versions:
    """The packages the library was built by and is loaded through."""

    tvm: str
    tvm_ffi: str


def versions() -> Versions:
    """The installed ones."""
    return Versions(version("apache-tvm"), version("apache-tvm-ffi"))


def bundle(folder: Path, kind: str) -> None:
    """Copy the libraries that run a target's artifact into it, and TVM's licence beside them."""
    for name in (RUNTIME, *([CUDA_RUNTIME] if kind == "cuda" else [])):
        path = folder / name
        library = Path(tvm.__file__).parent / "lib" / path.name
        if not library.is_file():
            raise XpucError(
                f"{library} is missing", "reinstall the compiler: pip install 'xpuc[compile]'"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, path)
    for licence in _licences():
        shutil.copyfile(licence, (folder / RUNTIME).parent / f"{licence.name}.tvm")


@cache
def _licences() -> tuple[Path, ...]:
    files = distribution("apache-tvm").files or []
    named = (next((f for f in files if f.name == name), None) for name in ("LICENSE", "NOTICE"))
    return tuple(Path(str(f.locate())) for f in named if f is not None)
