"""Bounds-checked reading of a memory-mapped little-endian file."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import FileError

DAMAGED = "the file is damaged or cut short: download or convert it again"

_LENGTH = struct.Struct("<Q")  # stands before the bytes of every string
_MAX_SHOWN = 80


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, read-only; the mapping lives as long as anything that refers to it.

    Raises FileError when the file is missing, unreadable, empty or not a regular file.
    """
    try:
        # Non-blocking, because opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"{path}: {reason}", "give the path of a GGUF file") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise FileError(f"{path}: is {kind}", "give the path of a GGUF file")
        if status.st_size == 0:
            raise FileError(f"{path}: is empty", DAMAGED)
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file shrank after fstat
        raise FileError(f"{path}: cannot be mapped: {error}", DAMAGED) from error
    finally:
        os.close(descriptor)


def shown(name: str) -> str:
    """A name out of a file, made fit for one line of an error message."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def damaged(path: Path, item: str, at: int, found: str) -> FileError:
    """The error for `item`, whose first wrong byte is byte `at` of the file."""
    return FileError(f"{path}: {item} at byte {at}: {found}", DAMAGED)


class ByteReader:
    """Reads from `position` onwards; every read is checked against the end of the file first.

    `item` says what is being read, for the error message.
    """

    def __init__(self, data: mmap.mmap, path: Path, position: int = 0) -> None:
        self.data = data
        self.path = path
        self.position = position
        self.end = len(data)

    def fault(self, item: str, found: str, at: int | None = None) -> FileError:
        """The error for what was found at byte `at`, by default the current position."""
        return damaged(self.path, item, self.position if at is None else at, found)

    def require(self, n_bytes: int, item: str) -> None:
        """Refuse an item of at least `n_bytes` bytes when fewer are left."""
        left = self.end - self.position
        if n_bytes > left:
            raise self.fault(item, f"needs {n_bytes} bytes, but {left} are left")

    def skip(self, n_bytes: int, item: str) -> int:
        """Step over `n_bytes`; returns where they start."""
        self.require(n_bytes, item)
        start = self.position
        self.position += n_bytes
        return start

    def u32(self, item: str) -> int:
        start = self.skip(4, item)
        return int.from_bytes(self.data[start : start + 4], "little")

    def u64(self, item: str) -> int:
        start = self.skip(8, item)
        return int.from_bytes(self.data[start : start + 8], "little")

    def array(self, dtype: np.dtype[Any], count: int, item: str) -> NDArray[Any]:
        """`count` numbers as a read-only view of the file, shape (count,)."""
        start = self.skip(count * dtype.itemsize, item)
        return np.frombuffer(self.data, dtype, count, start)

    def name(self, max_bytes: int, item: str) -> str:
        """A string of 1 to `max_bytes` bytes of UTF-8."""
        start = self.position
        n_bytes = self.u64(item)
        if not 0 < n_bytes <= max_bytes:
            raise self.fault(item, f"its name has {n_bytes} bytes, not 1 to {max_bytes}", start)
        return self._decode(self.skip(n_bytes, item), self.position, item)

    def text(self, item: str) -> str:
        """A string of UTF-8."""
        n_bytes = self.u64(item)
        return self._decode(self.skip(n_bytes, item), self.position, item)

    def texts(self, count: int, item: str) -> list[str]:
        """`count` strings of UTF-8, one behind the other."""
        texts: list[str] = []
        for start, end in self._spans(count, item):
            try:
                texts.append(self.data[start:end].decode())
            except UnicodeDecodeError as error:
                at = start + error.start
                raise self.fault(f"{item}[{len(texts)}]", "is not UTF-8", at) from error
        return texts

    def skip_texts(self, count: int, item: str) -> None:
        """Step over `count` strings, of which only the lengths are read."""
        for _ in self._spans(count, item):
            pass

    def _spans(self, count: int, item: str) -> Iterator[tuple[int, int]]:
        # Where the bytes of `count` strings start and end. On its own, not made of the reads above:
        # a vocabulary of 262144 strings is walked whenever its file is opened.
        self.require(count * _LENGTH.size, item)
        unpack_length, width = _LENGTH.unpack_from, _LENGTH.size
        data, position, last = self.data, self.position, self.end - width
        for index in range(count):
            if position > last:
                raise self.fault(f"{item}[{index}]", "the file ends inside its length", position)
            start = position + width
            position = start + unpack_length(data, position)[0]
            if position > self.end:
                found = f"needs {position - start} bytes, but {self.end - start} are left"
                raise self.fault(f"{item}[{index}]", found, start)
            yield start, position
        self.position = position

    def _decode(self, start: int, end: int, item: str) -> str:
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise self.fault(item, "is not UTF-8", start + error.start) from error
