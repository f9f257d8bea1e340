"""Allocates this and that on purpose, and prints what the counters say of it."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys

import numpy as np
from allocations import of_arrays, of_the_system


def main() -> dict[str, object]:
    libc = ctypes.CDLL(None)
    for name in ("malloc", "calloc", "realloc"):
        getattr(libc, name).restype = ctypes.c_void_p
    size = ctypes.c_size_t
    libc.malloc(size(100))
    with of_the_system(256) as system:
        libc.malloc(size(255))
        kept = libc.malloc(size(300))
        libc.calloc(size(64), size(8))
        kept = libc.realloc(ctypes.c_void_p(kept), size(4000))
        libc.realloc(ctypes.c_void_p(kept), size(3000))
        page = mmap.mmap(-1, 8192)
    page.close()
    base = np.arange(6)
    with of_arrays() as arrays:
        np.zeros(3)[1:]
        base[:2]
    base[2:]
    return {
        "system": [(each.call, each.size) for each in system],
        "arrays": arrays,
    }


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main())}\n")
