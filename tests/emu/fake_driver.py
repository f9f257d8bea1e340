"""Loads the fake driver into this process, so that TVM finds one emulated GPU.

import emu.fake_driver
emu.fake_driver.load()  # before anything imports tvm
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from emu import compiler

ORDERS = ("forward", "reverse", "shuffle")


@cache
def load() -> ctypes.CDLL:
    """The fake libcuda, preloaded with libcudart under the names TVM's runtime is linked to."""
    if "tvm" in sys.modules:
        raise RuntimeError("tvm is imported already: tests/emu needs a pytest process of its own")
    folder = compiler.driver_folder()
    driver = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "libcudart.so.13"), ctypes.RTLD_GLOBAL)
    for counter in (driver.emu_launches, driver.emu_launches_of, driver.emu_graph_launches):
        counter.restype = ctypes.c_long
    return driver


def launches(kernel: str | None = None) -> int:
    """How many kernels ran so far, or how often this one did."""
    driver = load()
    return int(driver.emu_launches_of(kernel.encode()) if kernel else driver.emu_launches())


def graph_launches() -> int:
    """How many CUDA graphs ran so far."""
    return int(load().emu_graph_launches())
