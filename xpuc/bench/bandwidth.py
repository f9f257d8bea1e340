"""How fast this machine reads memory: the roof over decoding, measured beside it.

The loop is in the artifact. For one without, the C library's memcmp compares equal halves of a
buffer: a few percent slower, without Python's lock, and in need of no compiler.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from xpuc.artifact import Manifest

_BUFFER_BYTES = 128 << 20  # of each thread: well beyond any cache
_PIECE_BYTES = 4 << 20


_DECISION = "memory_read"  # its facts in the manifest: {"elements", "bytes": of a call}


class Bandwidth(Protocol):
    """Memory to be read again and again."""

    def measure(self) -> float:
        """Bytes a second of all threads together."""


def read_bandwidth(model: object, manifest: Manifest, threads: int) -> Bandwidth:
    """By the loop of a loaded artifact, if it has one."""
    facts = manifest.decisions.get(_DECISION)
    if facts is None:
        return Compared(threads)
    return Loop(cast("Any", model).loop(_DECISION, int(facts["elements"])), int(facts["bytes"]))


class Loop:
    """The artifact's loop, which reads `n_bytes`."""

    def __init__(self, run: Callable[[], object], n_bytes: int) -> None:
        self._run, self._n_bytes = run, n_bytes

    def measure(self) -> float:
        """Bytes a second of all threads together."""
        start = time.perf_counter()
        self._run()
        return self._n_bytes / (time.perf_counter() - start)


class Compared:
    """Buffers of `threads` threads for memcmp."""

    def __init__(self, threads: int) -> None:
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._buffers = [_filled(_BUFFER_BYTES) for _ in range(threads)]

    def measure(self) -> float:
        """Bytes a second of all threads together, each through its buffer once."""
        barrier = threading.Barrier(len(self._buffers) + 1)
        threads = [
            threading.Thread(target=self._read, args=(buffer, barrier)) for buffer in self._buffers
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        return len(self._buffers) * _BUFFER_BYTES / (time.perf_counter() - start)

    def _read(self, buffer: mmap.mmap, barrier: threading.Barrier) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        barrier.wait()
        half = _PIECE_BYTES // 2
        for offset in range(0, _BUFFER_BYTES, _PIECE_BYTES):
            self._memcmp(address + offset, address + offset + half, half)


def _filled(n_bytes: int) -> mmap.mmap:
    """Memory with a page behind every byte: untouched zero pages would all be one."""
    buffer = mmap.mmap(-1, n_bytes)
    for offset in range(0, n_bytes, _PIECE_BYTES):
        buffer[offset : offset + _PIECE_BYTES] = b"\x01" * _PIECE_BYTES
    return buffer
