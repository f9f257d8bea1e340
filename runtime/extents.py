"""The extents of a block store: one file of places of equal size, each with one block or none.

All blocks of a store have the same size, so what was evicted leaves room for exactly one other:
the file grows at its end until it is as large as it may be, and from then on a place is reused.
A place is a header, the payload, and zeros up to a whole page, so that no write has to read the
page it ends in. Everything but the zeros is under XXH3, seeded with the store's identity: what was
cut, overwritten, flipped, or written by another store does not read as a block.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Buffer = bytes | bytearray | memoryview | NDArray[Any]
    Buffers = Buffer | Sequence[Buffer]

KEY_BYTES = 16
_MAGIC = b"xpuc\x00kv\x01"
_FIELDS = struct.Struct("<8s16sQQ16s")  # magic, key, stamp, payload bytes, payload XXH3-128
_HEADER_BYTES = _FIELDS.size + 8  # and the XXH3-64 of the fields
_PAGE = 4096


class Header(NamedTuple):
    """What a place says it holds. `stamp` rises with every block written."""

    key: bytes
    stamp: int
    digest: bytes


def byte_views(buffers: Buffers) -> list[memoryview]:
    """One buffer, or a sequence of them, as C-contiguous bytes. Nothing is copied."""
    parts = buffers if isinstance(buffers, list | tuple) else (buffers,)
    return [memoryview(part).cast("B") for part in parts]


def place_bytes(block_bytes: int) -> int:
    """Bytes of the file one block takes."""
    return -(-(_HEADER_BYTES + block_bytes) // _PAGE) * _PAGE


class ExtentFile:
    """Blocks of `block_bytes` by the number of their place; open until `close`."""

    def __init__(self, path: Path, block_bytes: int, seed: int) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._seed = seed
        self._used_bytes = _HEADER_BYTES + block_bytes
        self._stride = place_bytes(block_bytes)
        self._zeros = bytes(self._stride - self._used_bytes)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def n_whole(self) -> int:
        """Places that do not reach over the end of the file."""
        return max(0, (self._size() - self._used_bytes) // self._stride + 1)

    def write(self, place: int, key: bytes, stamp: int, payload: Sequence[memoryview]) -> None:
        """OSError if not all of it was taken; the place then holds nothing that can be read."""
        fields = _FIELDS.pack(_MAGIC, key, stamp, self._block_bytes, self._digest(payload))
        parts: list[bytes | memoryview] = [fields, self._fields_digest(fields)]
        parts += [*payload, self._zeros]
        if os.pwritev(self._file, parts, place * self._stride) != self._stride:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def read(self, place: int, key: bytes, into: Sequence[memoryview]) -> bool:
        """Whether `into` now holds the payload of `key`; if not, what it holds is undefined."""
        header = bytearray(_HEADER_BYTES)
        try:
            n_read = os.preadv(self._file, (header, *into), place * self._stride)
        except OSError:  # a medium that fails
            return False
        found = self._parse(header)
        return (
            n_read == self._used_bytes
            and found is not None
            and found.key == key
            and found.digest == self._digest(into)
        )

    def headers(self) -> Iterator[tuple[int, Header]]:
        """Each place whose header is sound. The payload is not looked at."""
        for place in range(self.n_whole):
            try:
                raw = os.pread(self._file, _HEADER_BYTES, place * self._stride)
            except OSError:
                continue
            if header := self._parse(raw):
                yield place, header

    def truncate(self, n_places: int) -> None:
        """Give back what lies behind the first `n_places`."""
        if self._size() > n_places * self._stride:
            os.ftruncate(self._file, n_places * self._stride)

    def sync(self) -> None:
        """Wait until everything written is on the medium."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def _digest(self, payload: Sequence[memoryview]) -> bytes:
        state = xxhash.xxh3_128(seed=self._seed)
        for part in payload:
            state.update(part)
        return state.digest()

    def _fields_digest(self, fields: bytes | bytearray) -> bytes:
        return xxhash.xxh3_64_digest(fields, seed=self._seed)

    def _parse(self, raw: bytes | bytearray) -> Header | None:
        fields = raw[: _FIELDS.size]
        if raw[_FIELDS.size :] != self._fields_digest(fields):
            return None
        magic, key, stamp, n_bytes, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC or n_bytes != self._block_bytes:
            return None
        return Header(key, stamp, digest)
