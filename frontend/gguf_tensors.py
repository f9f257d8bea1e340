"""The tensors of a GGUF file: where each lies and what it is, checked; their bytes are not read.

An entry is a name, the number of dimensions, the dimensions (innermost first), a type id, and the
offset of the weights in the data, which starts at the first aligned byte behind the entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import UnsupportedError
from xpuc.frontend.ggml_types import SUPPORTED, TYPES, GgmlType
from xpuc.frontend.gguf_bytes import ByteReader, shown

MAX_TENSORS = 1 << 16  # a mixture of experts stored one tensor an expert has about 50000
_MAX_NAME_BYTES = 64  # by the specification, as is the number of dimensions
_MAX_DIMENSIONS = 4
_MIN_ENTRY_BYTES = 25  # name length, a name of one byte, number of dimensions, type, offset
_MAX_WEIGHTS = (1 << 63) - 1


@dataclass(frozen=True, eq=False, slots=True)
class PackedTensor:
    """A weight as it is stored: blocks of `format`, row after row.

    `shape` is in numpy's order, rows before columns; `data` is a read-only view of the file, uint8
    (n_bytes,), which starts at byte `offset` of `path`.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: NDArray[np.uint8]
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int  # from the start of the data
    at: int  # of this entry in the file

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_weights * self.type.block_bytes


def check_tensor_count(reader: ByteReader, n_tensors: int) -> None:
    """Refuse a number of tensors that the file cannot hold, or that no model needs."""
    item = f"directory of {n_tensors} tensors"
    reader.require(n_tensors * _MIN_ENTRY_BYTES, item)
    if n_tensors > MAX_TENSORS:
        raise UnsupportedError(f"{reader.path}: has a {item}", f"at most {MAX_TENSORS} are read")


def read_tensors(
    reader: ByteReader, n_tensors: int, alignment: int, *, strict: bool
) -> list[PackedTensor]:
    """Reads the directory of `n_tensors` tensors at the reader's position.

    A type that xpuc cannot decode is an UnsupportedError, unless `strict` is false.
    """
    entries: dict[str, _Entry] = {}
    for index in range(n_tensors):
        entry = _read_entry(reader, f"tensor entry {index}", strict=strict)
        if entry.name in entries:
            raise reader.fault(_item(entry), "is there a second time", entry.at)
        entries[entry.name] = entry
    data_start = -(-reader.position // alignment) * alignment
    return _place(reader, list(entries.values()), data_start, alignment)


def _read_entry(reader: ByteReader, item: str, *, strict: bool) -> _Entry:
    at = reader.position
    reader.require(_MIN_ENTRY_BYTES, item)
    name = reader.name(_MAX_NAME_BYTES, item)
    item = f"tensor {shown(name)}"
    dimensions = _read_dimensions(reader, item)
    type_at = reader.position
    type_id = reader.u32(item)
    if type_id not in TYPES:
        raise UnsupportedError(
            f"{reader.path}: {item} at byte {type_at}: has the unknown type id {type_id}",
            f"supported: {' '.join(SUPPORTED)}",
        )
    type_ = TYPES[type_id]
    if strict:
        _refuse_unsupported(reader.path, item, type_)
    columns = dimensions[0] if dimensions else 1
    if columns % type_.block_weights:
        found = (
            f"has rows of {columns} weights, but {type_.name} has blocks of {type_.block_weights}"
        )
        raise reader.fault(item, found, at)
    return _Entry(name, dimensions[::-1], type_, reader.u64(item), at)


def _read_dimensions(reader: ByteReader, item: str) -> tuple[int, ...]:
    at = reader.position
    count = reader.u32(item)
    if count > _MAX_DIMENSIONS:
        raise reader.fault(item, f"has {count} dimensions, more than {_MAX_DIMENSIONS}", at)
    dimensions = tuple(reader.u64(item) for _ in range(count))
    if 0 in dimensions:
        raise reader.fault(item, f"has a dimension of 0 in {list(dimensions)}", at)
    if math.prod(dimensions) > _MAX_WEIGHTS:
        raise reader.fault(item, f"has too many weights: {list(dimensions)} overflows", at)
    return dimensions


def _refuse_unsupported(path: Path, item: str, type_: GgmlType) -> None:
    if type_.replacement:
        raise UnsupportedError(
            f"{path}: {item} is {type_.name}, which ggml has removed",
            f"quantise the model to {type_.replacement} instead; supported: {' '.join(SUPPORTED)}",
        )
    if not type_.is_supported:
        raise UnsupportedError(
            f"{path}: {item} is {type_.name}, which xpuc cannot decode",
            f"supported: {' '.join(SUPPORTED)}",
        )


def _place(
    reader: ByteReader, entries: list[_Entry], data_start: int, alignment: int
) -> list[PackedTensor]:
    # The data must follow the order of the entries, so that no two tensors share a byte.
    tensors: list[PackedTensor] = []
    used = 0  # bytes of data up to the end of the last tensor
    for previous, entry in zip([None, *entries], entries, strict=False):
        start = data_start + entry.offset
        if entry.offset % alignment:
            found = f"has offset {entry.offset}, not a multiple of {alignment}"
            raise reader.fault(_item(entry), found, entry.at)
        if previous and entry.offset < used:
            relation = "overlaps" if entry.offset >= previous.offset else "lies before"
            found = f"has offset {entry.offset} and {relation} tensor {shown(previous.name)}"
            raise reader.fault(_item(entry), found, entry.at)
        used = entry.offset + entry.n_bytes
        if data_start + used > reader.end:
            found = f"needs {entry.n_bytes} bytes, but the file ends at byte {reader.end}"
            raise reader.fault(_item(entry), found, start)
        data = np.frombuffer(reader.data, np.uint8, entry.n_bytes, start)
        tensors.append(
            PackedTensor(entry.name, entry.shape, entry.type.name, data, reader.path, start)
        )
    return tensors


def _item(entry: _Entry) -> str:
    return f"tensor {shown(entry.name)}"
