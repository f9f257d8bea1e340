"""The metadata of a GGUF file: typed values by key, decoded when they are asked for.

An entry is a key, the id of a kind, and a value: a number or string of that kind, or, for the
array kind, the id of the elements' kind, their number, and the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import UnsupportedError
from xpuc.frontend.gguf_bytes import ByteReader, damaged, shown

Value: TypeAlias = bool | int | float | str | list[str] | NDArray[Any]

MAX_ENTRIES = 1 << 16  # real files have about 50
_MAX_KEY_BYTES = (1 << 16) - 1  # by the specification
_MIN_ENTRY_BYTES = 14  # key length, a key of one byte, kind, a value of one byte

_STRING = "string"
_ARRAY_ID = 9
_KINDS: dict[int, str] = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    8: _STRING,
    10: "uint64",
    11: "int64",
    12: "float64",
}
_DTYPES = {kind: np.dtype(kind).newbyteorder("<") for kind in _KINDS.values() if kind != _STRING}


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    count: int | None  # None: one value, not an array
    offset: int  # of the value in the file


class Metadata(Mapping[str, Value]):
    """Metadata by key.

    A number is an int, float or bool; a string is a str; an array of numbers is a read-only view
    of the file, shape (n,); an array of strings is a list, made on first use and kept. A string
    that is not UTF-8 is a FileError when it is asked for.
    """

    def __init__(self, reader: ByteReader, entries: dict[str, _Entry]) -> None:
        self._data = reader.data
        self._path = reader.path
        self._entries = entries
        self._decoded: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, self._entries[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries  # Mapping's own would decode the value

    def kind(self, key: str) -> str:
        """The stored kind, such as "uint32" or "string"; "string[]" for an array of them."""
        entry = self._entries[key]
        return entry.kind if entry.count is None else f"{entry.kind}[]"

    def n_values(self, key: str) -> int:
        """The length of an array, known without decoding it; 1 for anything else."""
        count = self._entries[key].count
        return 1 if count is None else count

    def offset(self, key: str) -> int:
        """Where in the file the value of `key` starts, in bytes."""
        return self._entries[key].offset

    def integer(self, key: str, default: int) -> int:
        """An integer of any width, or `default` where the key is missing; else FileError."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        found = f"is {self.kind(key)}, not an integer"
        raise damaged(self._path, f"key {shown(key)}", self.offset(key), found)

    def _decode(self, key: str, entry: _Entry) -> Value:
        reader = ByteReader(self._data, self._path, entry.offset)
        item = f"key {shown(key)}"
        if entry.kind == _STRING:
            return reader.text(item) if entry.count is None else reader.texts(entry.count, item)
        if entry.count is not None:
            return reader.array(_DTYPES[entry.kind], entry.count, item)
        number: bool | int | float = reader.array(_DTYPES[entry.kind], 1, item)[0].item()
        return number


def read_metadata(reader: ByteReader, n_entries: int) -> Metadata:
    """Reads the directory of `n_entries` entries at the reader's position; decodes no value."""
    entries: dict[str, _Entry] = {}
    for index in range(n_entries):
        start = reader.position
        reader.require(_MIN_ENTRY_BYTES, f"metadata entry {index}")
        key = reader.name(_MAX_KEY_BYTES, f"metadata entry {index}")
        if key in entries:
            raise reader.fault(f"key {shown(key)}", "is there a second time", start)
        entries[key] = _read_entry(reader, f"key {shown(key)}")
    return Metadata(reader, entries)


def check_entry_count(reader: ByteReader, n_entries: int) -> None:
    """Refuse a number of entries that the file cannot hold, or that no model needs."""
    item = f"metadata of {n_entries} entries"
    reader.require(n_entries * _MIN_ENTRY_BYTES, item)
    if n_entries > MAX_ENTRIES:
        raise UnsupportedError(f"{reader.path}: has {item}", f"at most {MAX_ENTRIES} are read")


def _read_entry(reader: ByteReader, item: str) -> _Entry:
    at = reader.position
    kind_id = reader.u32(item)
    count = None
    if kind_id == _ARRAY_ID:
        at = reader.position
        kind_id = reader.u32(item)
        count = reader.u64(item)
        if kind_id == _ARRAY_ID:
            found = f"{reader.path}: {item} at byte {at}: is an array of arrays"
            raise UnsupportedError(found, "arrays of numbers, booleans and strings are read")
    if kind_id not in _KINDS:
        raise reader.fault(item, f"has the unknown kind {kind_id}", at)
    entry = _Entry(_KINDS[kind_id], count, reader.position)
    _skip_value(reader, entry, item)
    return entry


def _skip_value(reader: ByteReader, entry: _Entry, item: str) -> None:
    count = 1 if entry.count is None else entry.count
    if entry.kind == _STRING and entry.count is None:
        reader.skip(reader.u64(item), item)
    elif entry.kind == _STRING:
        reader.skip_texts(count, item)
    elif entry.kind == "bool":
        wrong = reader.array(np.dtype(np.uint8), count, item) > 1
        if wrong.any():
            found = "is a boolean that is neither 0 nor 1"
            raise reader.fault(item, found, entry.offset + int(wrong.argmax()))
    else:
        reader.skip(count * _DTYPES[entry.kind].itemsize, item)
