"""The first GPU of this machine as a board, in this process: tvm_ffi and a bundle's TVM runtime.

A step of the model reads each weight once, so a run is timed from a cold cache: before it, what
`flush` launches reads more memory than the cache holds. It is queued on the same stream, so that
the launch of what is timed hides behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from xpuc.artifact import CUDA_RUNTIME
from xpuc.errors import ArtifactError
from xpuc.runtime import nvidia
from xpuc.runtime.checks import series
from xpuc.runtime.model import open_runtime
from xpuc.runtime.places import Gpu, load_cuda, own_arch, runs_on
from xpuc.tuning.bundle import BundleManifest
from xpuc.tuning.kernels import BoardLost, Call, Timer, lost

DRIVER_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Card:
    """A GPU: its name, NVIDIA's driver as it names itself, and the compute capability (9.0)."""

    name: str
    driver: str
    capability: str

    def __str__(self) -> str:
        return f"{self.name}, driver {self.driver}"

    def must_run(self, arch: str, what: str) -> None:
        """ArtifactError if it does not run code for an architecture, that of `what`."""
        if not runs_on(arch, self.capability):
            raise ArtifactError(
                f"{what}: has code for {arch}; {self.name} is of compute capability"
                f" {self.capability}",
                f"give --target 'cuda -arch={own_arch(self.capability)}' with the MODEL",
            )


def own_card() -> Card:
    """The first GPU of this machine; ArtifactError if there is none."""
    gpu = nvidia.first_gpu()
    driver = DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.is_file() else gpu.driver
    return Card(gpu.name, driver, gpu.capability)


def check(manifest: BundleManifest, what: Path) -> Card:
    """The card a bundle's code runs on; ArtifactError says why there is none."""
    found = version("apache-tvm-ffi")
    if series(found) != series(manifest.tvm_ffi):
        raise ArtifactError(
            f"{what}: made with apache-tvm-ffi {manifest.tvm_ffi}, installed is {found}",
            f"pip install 'apache-tvm-ffi=={manifest.tvm_ffi}'",
        )
    card = own_card()
    card.must_run(manifest.arch, str(what))
    return card


class Box:
    """A kernels.Board. `flush` empties the cache; without it runs are timed as they come."""

    def __init__(self, folder: Path) -> None:
        gpu = nvidia.first_gpu()
        open_runtime(folder)
        load_cuda(folder / CUDA_RUNTIME)
        self._gpu = Gpu(gpu.capability)
        self._cuda: Any = ctypes.CDLL(None)  # the CUDA runtime library is loaded for all
        self.flush: Callable[[], None] = lambda: None

    def load(self, library: Path) -> Any:
        """See kernels.Board."""
        return lost(lambda: tvm_ffi.load_module(str(library)))

    def tensor(self, array: NDArray[Any]) -> Any:
        """See kernels.Board."""
        return lost(lambda: self._gpu.tensor(np.ascontiguousarray(array)))

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """See kernels.Board."""
        return lost(lambda: self._gpu.empty(tuple(shape), dtype))

    def array(self, tensor: Any) -> NDArray[Any]:
        """See kernels.Board."""
        found: NDArray[Any] = lost(lambda: self._gpu.array(tensor))
        return found

    def timer(self, module: Any, calls: Sequence[Call]) -> Timer:
        """See kernels.Board."""

        def run() -> None:
            for call in calls:
                module[call.function](*call.args)

        def seconds(repeat: int) -> list[float]:
            taken: list[float] = lost(lambda: self._seconds(run, repeat))
            return taken

        return seconds

    def _seconds(self, run: Callable[[], None], repeat: int) -> list[float]:
        spans = [(self._event(), self._event()) for _ in range(repeat)]
        for start, end in spans:
            self.flush()
            self._check(self._cuda.cudaEventRecord(start, None))
            run()
            self._check(self._cuda.cudaEventRecord(end, None))
        return [self._between(start, end) for start, end in spans]

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._check(self._cuda.cudaEventCreate(ctypes.byref(event)))
        return event

    def _between(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Seconds; the events are gone after it."""
        milliseconds = ctypes.c_float()
        self._check(self._cuda.cudaEventSynchronize(end))
        self._check(self._cuda.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end))
        for event in (start, end):
            self._check(self._cuda.cudaEventDestroy(event))
        return max(milliseconds.value, 1e-6) / 1e3

    def _check(self, status: int) -> None:
        if status:
            raise BoardLost(f"CUDA error {status}")
