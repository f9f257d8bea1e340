"""TVM's CUDA half on a machine without a GPU.

TVM makes device code where its library `libtvm_runtime_cuda` is loaded, and that needs libcuda,
which comes with NVIDIA's driver, and libcudart. Without them TVM says nothing and keeps CUDA
source, to be compiled where the artifact runs. So libcudart is taken from PyPI's wheel where the
system has none, and a library of the functions of libcuda that TVM names stands in for the
driver: nothing is launched while compiling, and each of them says there is no device.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path

import tvm
import tvm_ffi
from tvm_ffi.libinfo import load_lib_ctypes

from xpuc.codegen.cuda.wheels import INSTALL, wheel_library
from xpuc.codegen.linker import link, require_linker
from xpuc.errors import XpucError

_LIBCUDA, _LIBCUDART = "libcuda.so.1", "libcudart.so.13"
_NAMED_BY_TVM = (
    "cuDeviceGetName", "cuFuncSetAttribute", "cuLaunchKernelEx", "cuModuleGetFunction",
    "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeTiled",
    "cuInit",  # a load of an artifact in this process asks
)  # fmt: skip
_TEXTS = ("cuGetErrorName", "cuGetErrorString")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@cache
def load() -> None:
    """Have TVM's CUDA half loaded, once; XpucError says what is missing for it."""
    if _is_loaded():
        return
    if not _can_load(_LIBCUDA):
        _load_stub()
    if not _can_load(_LIBCUDART):
        ctypes.CDLL(str(wheel_library(_LIBCUDART)), ctypes.RTLD_GLOBAL)
    folder = Path(tvm.__file__).parent / "lib"
    try:
        load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL", extra_lib_paths=[folder])
    except (OSError, RuntimeError) as error:
        raise XpucError(f"TVM's CUDA library does not load ({error})", INSTALL) from None


def _is_loaded() -> bool:
    """Whether TVM has the function that makes a module of device code."""
    return tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _load_stub() -> None:
    linker = require_linker()
    with tempfile.TemporaryDirectory(prefix="xpuc-") as folder:
        source, library = Path(folder) / "libcuda.c", Path(folder) / _LIBCUDA
        source.write_text(_stub_source(), encoding="utf-8")
        link(linker, str(library), [str(source)], [f"-Wl,-soname,{_LIBCUDA}"])
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _stub_source() -> str:
    calls = [f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in _NAMED_BY_TVM]
    texts = [
        f'int {name}(int error, const char **text) {{ *text = "no CUDA device"; return 0; }}'
        for name in _TEXTS
    ]
    return "\n".join([*calls, *texts, ""])
