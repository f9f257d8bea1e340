"""NVIDIA's driver, the CUDA runtime library, and the first GPU: found, or what is missing said."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpuc.errors import ArtifactError

RELEASE = 13  # of CUDA: the one that TVM's CUDA half is linked with
_DRIVER, _CUDART = "libcuda.so.1", f"libcudart.so.{RELEASE}"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # of the compute capability: CUdevice_attribute
_UPDATE = (
    f"install one of CUDA {RELEASE} (580 or later); on a data centre's GPU the libraries of"
    f" NVIDIA's package cuda-compat-{RELEASE}-0, first in LD_LIBRARY_PATH, serve as well"
)


@dataclass(frozen=True)
class GpuFacts:
    """The first GPU; `driver` is the release of CUDA that the driver has, such as 13.0."""

    name: str
    capability: str  # 9.0
    driver: str
    free_bytes: int
    total_bytes: int


def first_gpu() -> GpuFacts:
    """The GPU that artifacts run on; ArtifactError says what is missing for it.

    Driver and runtime library are loaded then, for all that is loaded after them.
    """
    driver = _driver()
    release = _release(driver)
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise _no_gpu()
    runtime = runtime_library()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), 0)
    major, minor = (_attribute(driver, number) for number in (_MAJOR, _MINOR))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    if status:
        raise ArtifactError(
            f"the GPU {name.value.decode()} cannot be used (CUDA error {status})",
            "see nvidia-smi: another process may have it to itself, or it needs a reset",
        )
    return GpuFacts(name.value.decode(), f"{major}.{minor}", release, free.value, total.value)


def _driver() -> Any:
    """NVIDIA's driver library, started."""
    try:
        driver = ctypes.CDLL(_DRIVER, ctypes.RTLD_GLOBAL)
    except OSError:
        raise ArtifactError(
            f"NVIDIA's driver ({_DRIVER}) is not on this machine",
            "install the driver of the GPU; in a container, start it with the GPU (--gpus all)",
        ) from None
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        raise _no_gpu()
    if status:
        raise ArtifactError(
            f"NVIDIA's driver does not start (CUDA error {status})", "see whether nvidia-smi does"
        )
    return driver


def _release(driver: Any) -> str:
    """Of CUDA, that the driver has; refused if it is before the runtime library's."""
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    release = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if number.value < 1000 * RELEASE:
        raise ArtifactError(
            f"NVIDIA's driver is of CUDA {release}, and CUDA {RELEASE} is needed", _UPDATE
        )
    return release


def _no_gpu() -> ArtifactError:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return ArtifactError(
        f"NVIDIA's driver finds no GPU{hidden}",
        "check nvidia-smi, or compile the model for the CPU: xpuc compile MODEL --target llvm",
    )


def runtime_library() -> Any:
    """CUDA's runtime library, of the first place that has it."""
    for path in (_CUDART, _of_toolkit(), *_of_packages()):
        try:
            return ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise ArtifactError(
        f"CUDA's runtime library ({_CUDART}) is not on this machine: not in the system's folders,"
        " in no CUDA toolkit, in no package of NVIDIA's or torch's",
        f"pip install 'nvidia-cuda-runtime=={RELEASE}.*'",
    )


def _of_toolkit() -> str:
    """Where an installed CUDA toolkit has it."""
    folder = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return str(Path(folder) / "lib64" / _CUDART)


def _of_packages() -> Iterator[str]:
    """Where NVIDIA's wheels have it, which torch brings too, and where torch has one of its own."""
    for folder in _folders(f"nvidia.cu{RELEASE}"):
        yield str(folder / "lib" / _CUDART)
    for folder in _folders("torch"):
        yield from map(str, sorted((folder / "lib").glob(f"libcudart*.so.{RELEASE}*")))


def _folders(package: str) -> list[Path]:
    """Those of a package, which is not imported."""
    parent, _, _ = package.partition(".")
    if importlib.util.find_spec(parent) is None:
        return []
    spec = importlib.util.find_spec(package)
    return [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []


def _attribute(driver: Any, number: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    return value.value
