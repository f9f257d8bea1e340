"""How fast this machine reads memory: the roof over decoding, measured beside it.

The C library's memcmp compares equal halves of a buffer: it reads as fast as a loop of vector loads
written for it (one that reads a single stream is a fifth slower), without Python's lock, and needs
no compiler, which a machine that only runs artifacts may lack.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

_BUFFER_BYTES = 128 << 20  # of each thread: well beyond any cache
_PIECE_BYTES = 4 << 20


class ReadBandwidth:
    """Buffers of `threads` threads, to be read again and again."""

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
