"""What code allocates: of the system (allocations.c, preloaded), as numpy arrays, in Python."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).with_name("allocations.c")
_TP_ALLOC = 304  # where CPython 3.8 and later keep a type's tp_alloc on a 64-bit machine
_N_OWN = 2  # frames of the shim itself


@dataclass(frozen=True)
class Allocation:
    """`call` of the C library for `size` bytes; `way` from its caller upwards: library:function."""

    call: str
    size: int
    way: tuple[str, ...]
    is_python: bool  # the interpreter's own, which tracemalloc sees


def build_shim(folder: Path) -> Path:
    """The library to preload; needs gcc."""
    path = folder / "allocations.so"
    command = ["gcc", "-O1", "-g", "-fno-omit-frame-pointer", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(path), str(SOURCE)], check=True)
    return path


def preloaded(shim: Path, script: Path, *args: object) -> str:
    """What a Python script prints that runs with the shim, and with tracemalloc from its start."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, args)],
        env=os.environ | {"LD_PRELOAD": str(shim), "PYTHONTRACEMALLOC": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Kept(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char_p),
        ("size", ctypes.c_size_t),
        ("n_frames", ctypes.c_int),
        ("frames", ctypes.c_void_p * 16),
    )


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@contextmanager
def of_the_system(least: int) -> Iterator[list[Allocation]]:
    """The allocations of `least` bytes and more in the block, filled in at its end: the first 256,
    and how many there were is the length of the list in any case."""
    shim = ctypes.CDLL(None)
    shim.allocations_get.restype = ctypes.POINTER(_Kept)
    shim.allocations_count.restype = ctypes.c_long
    found: list[Allocation] = []
    shim.allocations_start(ctypes.c_size_t(least))
    try:
        yield found
    finally:
        shim.allocations_stop()
        for n in range(shim.allocations_count()):
            kept = shim.allocations_get(n)
            found.append(_read(kept[0]) if kept else found[-1])


def _read(kept: Any) -> Allocation:
    way = [_symbol(address) for address in kept.frames[_N_OWN : kept.n_frames]]
    interpreter = _symbol(ctypes.cast(ctypes.pythonapi.PyObject_Malloc, ctypes.c_void_p).value)
    return Allocation(
        kept.call.decode(), kept.size, tuple(f"{file}:{name}" for file, name in way),
        is_python=bool(way) and way[0][0] == interpreter[0],
    )  # fmt: skip


def _symbol(address: int | None) -> tuple[str, str]:
    """The library an address is in, and the function or the place in the library."""
    symbol = _Symbol()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol)):
        return "?", hex(address or 0)
    place = hex((address or 0) - (symbol.base or 0))
    return Path(symbol.file.decode()).name, symbol.name.decode() if symbol.name else place


@contextmanager
def of_arrays() -> Iterator[Counter[str]]:
    """How many numpy arrays the block makes, views and such as are dropped at once among them, by
    the line of Python that makes them."""
    made: Counter[str] = Counter()
    tp_alloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t)
    slot = ctypes.c_void_p.from_address(id(np.ndarray) + _TP_ALLOC)
    before = slot.value
    assert before is not None
    allocate = tp_alloc(before)

    def count(kind: int, n_items: int) -> int:
        frame = sys._getframe(1)
        made[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1
        address: int = allocate(kind, n_items)
        return address

    counting = tp_alloc(count)  # has to live as long as it may be called
    slot.value = ctypes.cast(counting, ctypes.c_void_p).value
    try:
        yield made
    finally:
        slot.value = before
