"""NVRTC: the CUDA compiler as a library, and the packing of what it makes into one fatbin.

Both libraries are called as their C interfaces are; NVIDIA's Python bindings would add 109 MB for
these dozen functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from xpuc.codegen.cuda import ptxas
from xpuc.codegen.cuda.compiler import FLAGS, PTXAS_FLAGS, Fatbin, source_error
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.room import without_spills
from xpuc.codegen.cuda.wheels import INSTALL, wheel_library
from xpuc.errors import XpucError


@dataclass(frozen=True)
class Nvrtc:
    """The compiler of PyPI's wheels."""

    folder: Path  # of the wheels: lib, include
    version: str

    @property
    def name(self) -> str:
        return f"NVRTC {self.version}"

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        """CUDA source to one fatbin with a cubin for each architecture."""
        with ThreadPoolExecutor() as threads:
            done = threads.map(lambda arch: self._compile_for(arch, source), archs)
            made = dict(zip(archs, done, strict=True))
        usage = tuple(row for _, rows in made.values() for row in rows)
        return Fatbin(pack({arch: cubin for arch, (cubin, _) in made.items()}), usage, source)

    def _compile_for(self, arch: str, source: str) -> tuple[bytes, Sequence[KernelUsage]]:
        """The machine code for one architecture, and what its kernels take."""

        def once(source: str) -> tuple[bytes, Sequence[KernelUsage]]:
            cubin, log = self._cubin(source, arch)
            return cubin, ptxas.parse(log)

        return without_spills(once, source)

    def _cubin(self, source: str, arch: str) -> tuple[bytes, str]:
        """The machine code for one architecture, and what the compiler said."""
        nvrtc = _nvrtc()
        program = ctypes.c_void_p()
        code = (_TENSOR_MAP + source).encode()
        _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"xpuc.cu", 0, None, None))
        try:
            options = self._options(arch)
            failed = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
            log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            if failed:
                raise source_error(self.name, arch, log.decode(errors="replace"))
            cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
            return cubin, log.decode(errors="replace")
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _options(self, arch: str) -> list[str]:
        include = self.folder / "include"
        return [
            f"--gpu-architecture={arch}",
            "-default-device",
            "--device-int128",
            f"--include-path={include}",
            f"--include-path={include / 'cccl'}",
            *(f"--ptxas-options={flag}" for flag in PTXAS_FLAGS),
            *FLAGS,
        ]


# What kernels that copy by tensor take; its type is in cuda.h, which NVRTC does not read.
_TENSOR_MAP = (
    "struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };"
    " typedef struct CUtensorMap_st CUtensorMap;\n"
)


@cache
def _nvrtc() -> Any:
    # NVRTC opens its builtins by name, so they must be loaded before it looks.
    ctypes.CDLL(str(_builtins()), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(wheel_library("libnvrtc.so.13")))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _builtins() -> Path:
    found = sorted(wheel_library("libnvrtc.so.13").parent.glob("libnvrtc-builtins.so.13.*"))
    if not found:
        raise XpucError("libnvrtc-builtins is not installed", INSTALL)
    return found[0]


def _check(status: int) -> None:
    if status:
        said = _nvrtc().nvrtcGetErrorString(status).decode()
        raise XpucError(f"NVRTC does not start ({said})", f"reinstall it: {INSTALL}")


def pack(cubins: dict[str, bytes]) -> bytes:
    """One fatbin of the cubins by architecture (sm_90a), which the driver picks from at load."""
    library = ctypes.CDLL(str(wheel_library("libnvfatbin.so.13")))
    handle, options = ctypes.c_void_p(), ["-64", "-host=linux", "-compress-all"]
    _packed(library.nvFatbinCreate(ctypes.byref(handle), _strings(options), len(options)))
    try:
        for arch, cubin in cubins.items():
            number, size = arch.removeprefix("sm_").encode(), ctypes.c_size_t(len(cubin))
            _packed(library.nvFatbinAddCubin(handle, cubin, size, number, b"xpuc"))
        return _bytes(library.nvFatbinSize, library.nvFatbinGet, handle)
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))


def _packed(status: int) -> None:
    if status:
        raise XpucError(
            f"the device code cannot be packed (nvFatbin error {status})",
            f"reinstall it: {INSTALL}",
        )


def _bytes(size_of: Any, read: Any, handle: ctypes.c_void_p) -> bytes:
    """What a pair of calls gives: the number of bytes, then the bytes."""
    size = ctypes.c_size_t()
    size_of(handle, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(handle, buffer)
    return buffer.raw


def _strings(values: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(values))(*(v.encode() for v in values))
