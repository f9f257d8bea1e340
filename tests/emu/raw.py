"""The fake driver without TVM: CUDA C compiled, launched and timed through its C API."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np
from emu import compiler, fake_driver

_MAP_ALIGNMENT = 64  # bytes: of a CUtensorMap
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


class CudaError(RuntimeError):
    """A call of the driver or the runtime failed; the message is cudaGetErrorString's."""


def _driver() -> ctypes.CDLL:
    return fake_driver.load()


def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL("libcudart.so.13")  # loaded already, so found by its name
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def check(status: int) -> None:
    """Raise CudaError unless the call succeeded."""
    if status:
        raise CudaError(_runtime().cudaGetErrorString(status).decode())


def call(name: str, *arguments: Any) -> None:
    """A function of the CUDA runtime, checked."""
    check(getattr(_runtime(), name)(*arguments))


class Memory:
    """Device memory; uninitialised, or a copy of an array."""

    def __init__(self, shape: Sequence[int] | int, dtype: Any = np.float32) -> None:
        self.pointer = c_void_p()
        self.array = np.empty(shape, dtype)
        call("cudaMalloc", byref(self.pointer), c_size_t(self.array.nbytes))

    @classmethod
    def of(cls, array: np.ndarray) -> Memory:
        made = cls(array.shape, array.dtype)
        made.write(array)
        call("cudaStreamSynchronize", None)
        return made

    def write(self, array: np.ndarray, stream: Any = None) -> None:
        data = np.ascontiguousarray(array)
        size, kind = c_size_t(data.nbytes), HOST_TO_DEVICE
        call("cudaMemcpyAsync", self.pointer, c_void_p(data.ctypes.data), size, kind, stream)

    def read(self) -> np.ndarray:
        result = np.empty_like(self.array)
        size = c_size_t(result.nbytes)
        call("cudaMemcpy", c_void_p(result.ctypes.data), self.pointer, size, DEVICE_TO_HOST)
        return result

    def free(self) -> None:
        call("cudaFree", self.pointer)


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("dynamic_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("n_attributes", c_uint),
    ]


class Module:
    """A compiled CUDA C source."""

    def __init__(self, source: str) -> None:
        self.handle = c_void_p()
        check(_driver().cuModuleLoadData(byref(self.handle), compiler.compile_cuda(source)))

    def function(self, name: str) -> c_void_p:
        function = c_void_p()
        check(_driver().cuModuleGetFunction(byref(function), self.handle, name.encode()))
        return function

    def allow_dynamic_bytes(self, name: str, size: int) -> None:
        check(_driver().cuFuncSetAttribute(self.function(name), 8, size))

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        dynamic_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Submit a launch. Arguments are Memory or ctypes values."""
        values = [a.pointer if isinstance(a, Memory) else a for a in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        config = _LaunchConfig(_three(grid), _three(block), dynamic_bytes, stream, None, 0)
        check(_driver().cuLaunchKernelEx(byref(config), self.function(name), pointers, None))

    def run(self, *arguments: Any, **options: Any) -> None:
        """Launch and wait."""
        self.launch(*arguments, **options)
        synchronize()


def _three(extents: int | Sequence[int]) -> Any:
    given = [extents] if isinstance(extents, int) else list(extents)
    return (c_uint * 3)(*given, *[1] * (3 - len(given)))


def synchronize(stream: Any = None) -> None:
    """Wait for the device, or for one stream."""
    if stream is None:
        call("cudaDeviceSynchronize")
    else:
        call("cudaStreamSynchronize", stream)


def create_stream(*, blocking: bool = True) -> c_void_p:
    stream = c_void_p()
    call("cudaStreamCreateWithFlags", byref(stream), c_uint(0 if blocking else 1))
    return stream


def create_event() -> c_void_p:
    event = c_void_p()
    call("cudaEventCreate", byref(event))
    return event


@contextmanager
def captured(stream: c_void_p) -> Iterator[c_void_p]:
    """What is submitted to the stream inside becomes an executable graph, given at the end."""
    graph, executable = c_void_p(), c_void_p()
    call("cudaStreamBeginCapture", stream, c_int(0))
    yield executable
    call("cudaStreamEndCapture", stream, byref(graph))
    call("cudaGraphInstantiate", byref(executable), graph, ctypes.c_ulonglong(0))
    call("cudaGraphDestroy", graph)


def tensor_map(memory: Memory, box: Sequence[int], *, swizzle: int) -> Any:
    """A CUtensorMap over a contiguous f16 or f32 array; box and its extents innermost last."""
    types = {"float16": 6, "float32": 7}
    array, rank = memory.array, memory.array.ndim
    room = (c_char * (128 + _MAP_ALIGNMENT))()
    opaque = (c_char * 128).from_buffer(room, -ctypes.addressof(room) % _MAP_ALIGNMENT)
    extents = (ctypes.c_uint64 * rank)(*array.shape[::-1])
    strides = (ctypes.c_uint64 * rank)(*array.strides[-2::-1], 0)
    ones, boxes = (c_uint * rank)(*[1] * rank), (c_uint * rank)(*box[::-1])
    kind = types[array.dtype.name]
    status = _driver().cuTensorMapEncodeTiled(
        opaque, kind, rank, memory.pointer, extents, strides, boxes, ones, 0, swizzle, 0, 0
    )
    check(status)
    return opaque
