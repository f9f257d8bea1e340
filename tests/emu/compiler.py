"""g++ as the compiler of the emulated GPU: the fake driver, and kernels; both kept by hash.

They are kept in $XDG_CACHE_HOME/xpuc-emu (~/.cache/xpuc-emu), which can be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from emu.translate import translate

HERE = Path(__file__).parent
DRIVER, DEVICE_CODE = HERE / "driver", HERE / "device_code"

_COMMON = ["-std=c++17", "-fPIC", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off"]
_DRIVER_FLAGS = [*_COMMON, "-O2", "-Wall", "-Wextra", "-Werror"]
# Poison in locals; a trap at a misaligned access and at an index past the end of a local array.
_KERNEL_FLAGS = [
    *_COMMON,
    "-Og",  # most of a test is this compiler's time
    "-w",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",  # or a kernel named `write` would be the C library's
    "-ftrivial-auto-var-init=pattern",
    "-D__CUDA_ARCH_FEAT_SM90_ALL",  # as of sm_90a
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
]


class CompileError(RuntimeError):
    """g++ refused; the message is its own."""


def cache_folder() -> Path:
    """Where what was compiled is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "xpuc-emu"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def driver_folder() -> Path:
    """A folder with the fake libcuda.so.1 and libcudart.so.13."""
    folder = cache_folder() / f"driver-{_digest(_sources(), _DRIVER_FLAGS)}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _build_driver(made)
            _keep(made, folder)
    return folder


def _build_driver(folder: Path) -> None:
    units = sorted(DRIVER.glob("*.cc"))
    objects = [folder / f"{unit.stem}.o" for unit in units]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda unit, out: _gxx([*_DRIVER_FLAGS, "-c", str(unit), "-o", str(out)]),
                units,
                objects,
            )
        )
    driver, runtime = folder / "libcuda.so.1", folder / "libcudart.so.13"
    of_runtime = folder / "cuda_runtime.o"
    of_driver = [str(o) for o in objects if o != of_runtime]
    direct = "-Wl,-Bsymbolic"  # calls within it are its own functions'
    _gxx(["-shared", direct, f"-Wl,-soname,{driver.name}", "-o", str(driver), *of_driver, "-ldl"])
    versions = f"-Wl,--version-script={DRIVER / 'cudart.map'}"
    soname = f"-Wl,-soname,{runtime.name}"
    _gxx(["-shared", soname, versions, "-o", str(runtime), str(of_runtime), str(driver)])


@cache
def _precompiled_header() -> Path:
    """A folder with cuda_host.h, precompiled with the flags kernels have."""
    folder = cache_folder() / f"header-{_digest(_sources(), _KERNEL_FLAGS)}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            wrapper = Path(scratch) / "made" / "cuda_host.h"
            wrapper.parent.mkdir()
            wrapper.write_text(f'#pragma once\n#include "{DEVICE_CODE / "cuda_host.h"}"\n')
            _gxx([*_KERNEL_FLAGS, "-x", "c++-header", str(wrapper), "-o", f"{wrapper}.gch"])
            _keep(wrapper.parent, folder)
    return folder


def compile_cuda(source: str) -> bytes:
    """The module image of a CUDA C source, as the fake cuModuleLoadData takes it."""
    header = _precompiled_header()
    code = translate(source)
    name = _digest([header], [code, *_KERNEL_FLAGS])
    library = cache_folder() / f"{name}.so"
    if not library.exists():
        unit = cache_folder() / f"{name}.cc"
        unit.write_text(code)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            made = Path(scratch) / library.name
            _gxx([*_KERNEL_FLAGS, "-I", str(header), "-shared", "-o", str(made), str(unit)])
            _keep(made, library)
    return f"EMU:{library}\0".encode()


def _gxx(arguments: Sequence[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"g++ {' '.join(arguments)}\n{done.stderr[:4000]}")


def _keep(made: Path, at: Path) -> None:
    """Move into place whole; another process may have been first."""
    with contextlib.suppress(OSError):
        made.rename(at)
    assert at.exists(), f"cannot write {at}"


@cache
def _sources() -> tuple[Path, ...]:
    return tuple(sorted([*DRIVER.iterdir(), *DEVICE_CODE.iterdir()]))


def _digest(files: Sequence[Path], texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else file.name.encode())
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:16]
