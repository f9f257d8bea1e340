"""What of CUDA's runtime library a step needs: a stream, events, pinned memory, graphs.

What fails is a CudaError; what failed on the
device is told by a later call, mostly the one that waits.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from xpuc.errors import XpucError
from xpuc.runtime import nvidia

_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_NO_TIMES = 2  # cudaEventDisableTiming
_OF_THIS_THREAD = 1  # cudaStreamCaptureModeThreadLocal
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cudaStreamCreateWithFlags": (c_void_p, c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamEndCapture": (c_void_p, c_void_p),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMallocHost": (c_void_p, c_size_t),
    "cudaFreeHost": (c_void_p,),
    "cudaEventCreateWithFlags": (c_void_p, c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventSynchronize": (c_void_p,),
    "cudaEventDestroy": (c_void_p,),
    "cudaEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cudaGraphInstantiate": (c_void_p, c_void_p, c_ulonglong),
    "cudaGraphLaunch": (c_void_p, c_void_p),
    "cudaGraphDestroy": (c_void_p,),
    "cudaGraphExecDestroy": (c_void_p,),
}


class CudaError(XpucError):
    """A call of CUDA's runtime library failed, or what was queued before it."""

    def __init__(self, function: str, status: int) -> None:
        library = _library()
        name, text = (
            getattr(library, f"cudaGetError{what}")(status).decode() for what in ("Name", "String")
        )
        super().__init__(
            f"{function}: {name} ({text})",
            "load the model again in a new process; if it comes back, see nvidia-smi and the"
            " driver's log (dmesg)",
        )


class Stream:
    """A queue of work on the GPU, which waits for the default stream's and is waited for by it."""

    def __init__(self) -> None:
        self.handle = _created("cudaStreamCreateWithFlags", c_uint(0))
        weakref.finalize(self, _library().cudaStreamDestroy, self.handle).atexit = False

    def to_device(self, to: int, source: int, n_bytes: int) -> None:
        """Queue a copy from pinned memory, which has to stay as it is until it was made."""
        _call("cudaMemcpyAsync", to, source, n_bytes, _TO_DEVICE, self.handle)

    def to_host(self, to: int, source: int, n_bytes: int) -> None:
        """Queue a copy to pinned memory."""
        _call("cudaMemcpyAsync", to, source, n_bytes, _TO_HOST, self.handle)

    @contextmanager
    def captured(self) -> Iterator[Graph]:
        """What is queued inside does not run: at the end it is the graph. Nothing inside may wait,
        or take or free memory, as garbage does that is collected: it is left for later."""
        graph, recorded = Graph(), c_void_p()
        with _no_collection():
            _call("cudaStreamBeginCapture", self.handle, _OF_THIS_THREAD)
            try:
                yield graph
            except BaseException:
                _library().cudaStreamEndCapture(self.handle, byref(recorded))
                if recorded:
                    _library().cudaGraphDestroy(recorded)
                raise
            _call("cudaStreamEndCapture", self.handle, byref(recorded))
        graph.instantiate(recorded)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Graph:
    """Launches that are queued all at once."""

    def instantiate(self, recorded: c_void_p) -> None:
        try:
            self._handle = _created("cudaGraphInstantiate", recorded, c_ulonglong(0))
        finally:
            _call("cudaGraphDestroy", recorded)
        weakref.finalize(self, _library().cudaGraphExecDestroy, self._handle).atexit = False

    def launch(self, stream: Stream) -> None:
        """Queue it; once it was captured."""
        _call("cudaGraphLaunch", self._handle, stream.handle)


class Event:
    """A point in a stream; `timed`: when it was reached is known."""

    def __init__(self, *, timed: bool = False) -> None:
        flags = c_uint(0 if timed else _NO_TIMES)
        self._handle = _created("cudaEventCreateWithFlags", flags)
        weakref.finalize(self, _library().cudaEventDestroy, self._handle).atexit = False

    def record(self, stream: Stream) -> None:
        """It is where the stream's queue ends now."""
        _call("cudaEventRecord", self._handle, stream.handle)

    def wait(self) -> None:
        """Until all before it was done; no wait if it was never recorded."""
        _call("cudaEventSynchronize", self._handle)

    def seconds_since(self, earlier: Event) -> float:
        """Between two timed events that were reached."""
        ms = c_float()
        _call("cudaEventElapsedTime", byref(ms), earlier._handle, self._handle)
        return ms.value / 1000


def seconds(stream: Stream, queue: Callable[[], object]) -> float:
    """What the stream takes for that which `queue` puts into it; waits for its end."""
    start, end = Event(timed=True), Event(timed=True)
    start.record(stream)
    queue()
    end.record(stream)
    end.wait()
    return end.seconds_since(start)


def pinned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that the GPU copies from and to while the process goes on."""
    pointer = c_void_p()
    _call("cudaMallocHost", byref(pointer), n_bytes)
    assert pointer.value is not None
    memory = (ctypes.c_uint8 * n_bytes).from_address(pointer.value)
    weakref.finalize(memory, _library().cudaFreeHost, pointer).atexit = False
    array: npt.NDArray[np.uint8] = np.ctypeslib.as_array(memory)  # whose views keep it
    array[:] = 0
    return array


@cache
def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = nvidia.runtime_library()
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    for name in ("cudaGetErrorName", "cudaGetErrorString"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise CudaError(name, status)


def _created(name: str, *arguments: Any) -> c_void_p:
    """A handle that a function gives out."""
    handle = c_void_p()
    _call(name, byref(handle), *arguments)
    return handle
