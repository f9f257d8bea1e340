"""What a compiler of device code is asked and gives, whichever it is.

No fast math: it flushes denormals, replaces division, square roots and `expf` by approximations and
lets sums be contracted, everywhere and silently, so that results move with the compiler and with
how a kernel is written. No contraction either: `a * b + c` is rounded twice unless the kernel says
`fma` (`schedules/cuda/tir.py`), which keeps a row's bits the same whatever the batch, as on the
CPU. Kernels name the approximate instructions they want, where their error is known not to matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.errors import XpucError

# Of NVRTC and nvcc alike. Warnings are of generated code: names TVM declares and does not use.
FLAGS = ("--std=c++17", "--fmad=false", "--disable-warnings")


# Of ptxas: at its default of 5 it spills a few bytes of many kernels for one more resident block.
PTXAS_FLAGS = ("-v", "--register-usage-level=8")


@dataclass(frozen=True)
class Fatbin:
    """Device code for several architectures in one file, which the driver picks from at load."""

    code: bytes
    usage: tuple[KernelUsage, ...]  # of every kernel on every architecture
    source: str  # CUDA C++, as TVM wrote it


class Compiler(Protocol):
    """CUDA source to machine code."""

    @property
    def name(self) -> str:
        """Its name and version, as the manifest records it."""

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        """One fatbin for all the architectures (sm_90a); XpucError with what is wrong."""


def source_error(compiler: str, arch: str, said: str) -> XpucError:
    """For source a compiler does not take: its first error, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    first = next((line for line in lines if "error" in line.lower()), lines[-1])
    return XpucError(
        f"{compiler}: the device code does not compile for {arch} ({first})",
        "this is a fault of xpuc: please report it with this line and the model's name",
    )
