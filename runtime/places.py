"""Where a model's tensors lie: in the process's own memory, or on a GPU.

Both are given numpy arrays. In the process's memory a tensor is the array. A GPU has a copy, or of
what is too much to have twice the rows alone, which are sent and fetched one at a time.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tvm_ffi

from xpuc.artifact import CUDA_RUNTIME, GPU_ARCHS, Manifest, compile_again
from xpuc.errors import ArtifactError
from xpuc.runtime import memory, nvidia

Array = npt.NDArray[Any]
_CPU, _CUDA = 1, 2  # DLPack's device types
_POOLED = 2  # the VM's pooled allocator
_FREE = 15  # of TVM's DeviceAttrKind


class Place(Protocol):
    """Memory that the kernels of a model work on."""

    vm_devices: tuple[int, ...]  # what the VM is initialised with
    is_host: bool  # whether a tensor is the array it was made of

    def runs(self, arch: str) -> bool:
        """Whether code for a GPU architecture runs on it."""

    def free_bytes(self) -> int:
        """What can be had of it."""

    def tensor(self, array: Array) -> Any:
        """A tensor of the array's contents."""

    def rows(self, array: Array, n: int) -> Any:
        """A tensor of `n` rows like those of an array, which has all of them or, if not `is_host`,
        one that each passes through when it is sent or fetched. They may hold anything."""

    def array(self, tensor: Any) -> Array:
        """What a tensor holds; waits for its kernels."""

    def copy_row(self, array: Array, tensor: Any, source: int, destination: int) -> None:
        """Row `destination` holds what row `source` does."""

    def send_row(self, array: Array, tensor: Any, row: int) -> None:
        """A row of the tensor holds what the array does."""

    def fetch_row(self, tensor: Any, array: Array, row: int) -> None:
        """A row of the array holds what the tensor does; waits for its kernels."""


class Process:
    """The process's own memory."""

    vm_devices: tuple[int, ...] = (_CPU, 0, _POOLED)
    is_host = True

    def runs(self, arch: str) -> bool:
        """See Place."""
        return False

    def free_bytes(self) -> int:
        """See Place."""
        return memory.free_bytes()

    def tensor(self, array: Array) -> Any:
        """See Place."""
        return tvm_ffi.from_dlpack(array)

    def rows(self, array: Array, n: int) -> Any:
        """See Place."""
        assert len(array) == n, f"{len(array)} rows of memory for {n}"
        return self.tensor(array)

    def array(self, tensor: Any) -> Array:
        """See Place."""
        return np.from_dlpack(tensor)

    def copy_row(self, array: Array, tensor: Any, source: int, destination: int) -> None:
        """See Place."""
        array[destination] = array[source]

    def send_row(self, array: Array, tensor: Any, row: int) -> None:
        """See Place."""

    def fetch_row(self, tensor: Any, array: Array, row: int) -> None:
        """See Place."""


class Gpu:
    """The memory of the first GPU, through the TVM runtime, which has to be loaded."""

    vm_devices: tuple[int, ...] = (_CUDA, 0, _POOLED, _CPU, 0, _POOLED)
    is_host = False

    def __init__(self, capability: str) -> None:
        self._capability = capability  # 9.0
        self.device = tvm_ffi.device("cuda", 0)
        self.dlpack_device = (_CUDA, 0)
        self._allocate, self._view, self._from_bytes, self._to_bytes, self._copy = (
            tvm_ffi.get_global_func(f"runtime.TVMTensor{name}")
            for name in (
                "AllocWithScope", "CreateView", "CopyFromBytes", "CopyToBytes", "CopyFromTo"
            )
        )  # fmt: skip

    def runs(self, arch: str) -> bool:
        """See Place."""
        return runs_on(arch, self._capability)

    def free_bytes(self) -> int:
        """See Place."""
        return int(_attribute(_FREE))

    def tensor(self, array: Array) -> Any:
        """See Place."""
        made = self.empty(array.shape, str(array.dtype))
        self._from_bytes(made, _address(array), array.nbytes)
        return made

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A tensor that holds anything."""
        return self._allocate(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), self.device, None)

    def rows(self, array: Array, n: int) -> Any:
        """See Place."""
        return self.empty((n, *array.shape[1:]), str(array.dtype))

    def array(self, tensor: Any) -> Array:
        """See Place."""
        found = np.empty(tuple(map(int, tensor.shape)), str(tensor.dtype))
        self._to_bytes(tensor, _address(found), found.nbytes)
        return found

    def view(self, tensor: Any, shape: tuple[int, ...], dtype: str, start: int) -> Any:
        """The bytes of a tensor from `start` on as one of another shape and dtype."""
        return self._view(tensor, tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), start)

    def copy_row(self, array: Array, tensor: Any, source: int, destination: int) -> None:
        """See Place."""
        self._copy(self._row(array, tensor, source), self._row(array, tensor, destination))

    def send_row(self, array: Array, tensor: Any, row: int) -> None:
        """See Place."""
        one = array[0]
        self._from_bytes(self._row(array, tensor, row), _address(one), one.nbytes)

    def fetch_row(self, tensor: Any, array: Array, row: int) -> None:
        """See Place."""
        one = array[0]
        self._to_bytes(self._row(array, tensor, row), _address(one), one.nbytes)

    def _row(self, array: Array, tensor: Any, row: int) -> Any:
        """One row of a tensor as a tensor of its own."""
        one = array[0]
        return self.view(tensor, one.shape, str(one.dtype), row * one.nbytes)


def _address(array: Array) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def place_of(manifest: Manifest, directory: Path) -> Place:
    """Where the tensors of an artifact lie; ArtifactError if nowhere. Its TVM runtime is loaded."""
    if manifest.target["kind"] != "cuda":
        return Process()
    gpu = nvidia.first_gpu()
    archs = manifest.decisions["device"]["archs"]
    if not any(runs_on(arch, gpu.capability) for arch in archs):
        raise ArtifactError(
            f"{directory}: has code for {', '.join(archs)}; {gpu.name} is of compute capability"
            f" {gpu.capability}",
            f"compile it with --target 'cuda -arch={own_arch(gpu.capability)}'",
        )
    load_cuda(directory / CUDA_RUNTIME)
    return Gpu(gpu.capability)


def runs_on(arch: str, capability: str) -> bool:
    """Whether code for an architecture (sm_90a) runs on a GPU of a compute capability (9.0).

    Code runs on later GPUs of its major version, with an `a` on the very one only.
    """
    code = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
    assert code is not None, arch
    major, minor = (int(part) for part in capability.split("."))
    if int(code[1]) != major:
        return False
    return minor == int(code[2]) if code[3] else minor >= int(code[2])


def own_arch(capability: str) -> str:
    """The newest architecture (sm_90a) whose code runs on a GPU of a compute capability (9.0).

    ArtifactError if no code can be made for one.
    """
    runs = [arch for arch in GPU_ARCHS if runs_on(arch, capability)]
    if not runs:
        raise ArtifactError(
            f"no code is made for a GPU of compute capability {capability}",
            f"there is code for {', '.join(GPU_ARCHS)}, and by --target llvm for the CPU",
        )
    return runs[-1]


def load_cuda(library: Path) -> None:
    """TVM's CUDA half, unless it is loaded; NVIDIA's libraries, which it is linked to, are."""
    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None:
        return
    try:
        ctypes.CDLL(str(library.resolve()))
    except OSError as error:
        raise ArtifactError(
            f"{library}: cannot be loaded ({error})", compile_again(library.parent.parent)
        ) from None


def _attribute(number: int) -> Any:
    """What the TVM runtime says of the first GPU."""
    return tvm_ffi.get_global_func("runtime.GetDeviceAttr")(_CUDA, 0, number)
