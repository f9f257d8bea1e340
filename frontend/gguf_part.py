"""One GGUF file: a whole model, or a part of one that was split.

"GGUF" | version u32 | n_tensors u64 | n_entries u64 | metadata | tensors | padding | data
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from xpuc.errors import FileError, UnsupportedError
from xpuc.frontend.gguf_bytes import ByteReader, map_file
from xpuc.frontend.gguf_metadata import Metadata, check_entry_count, read_metadata
from xpuc.frontend.gguf_tensors import PackedTensor, check_tensor_count, read_tensors

_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MIN_ALIGNMENT = 8  # by the specification
_MAX_ALIGNMENT = 1 << 20

_CONVERT = "convert the model with llama.cpp's convert_hf_to_gguf.py"
_OTHER_FILES = {  # first bytes: what the file is, what to do
    b"lmgg": ("a GGML file from before GGUF", _CONVERT),
    b"fmgg": ("a GGMF file from before GGUF", _CONVERT),
    b"tjgg": ("a GGJT file from before GGUF", _CONVERT),
    b"PK\x03\x04": ("a zip archive, perhaps a PyTorch checkpoint", _CONVERT),
    b"vers": ("a Git LFS pointer, perhaps", "fetch the model itself: git lfs pull"),
}


@dataclass(frozen=True, eq=False)
class Part:
    """An opened file."""

    path: Path
    version: int
    alignment: int  # bytes; of the tensors' data
    metadata: Metadata
    tensors: list[PackedTensor]
    data: mmap.mmap


def open_part(path: Path, *, strict: bool) -> Part:
    """Opens one file; see open_gguf for the errors."""
    reader = ByteReader(map_file(path), path)
    version = _read_version(reader)
    n_tensors = reader.u64("number of tensors")
    n_entries = reader.u64("number of metadata entries")
    check_tensor_count(reader, n_tensors)
    check_entry_count(reader, n_entries)
    metadata = read_metadata(reader, n_entries)
    alignment = _alignment(reader, metadata)
    tensors = read_tensors(reader, n_tensors, alignment, strict=strict)
    return Part(path, version, alignment, metadata, tensors, reader.data)


def _read_version(reader: ByteReader) -> int:
    magic = reader.data[:4]
    if magic != b"GGUF":
        _refuse_magic(reader.path, magic)
    reader.skip(4, "magic")
    at = reader.position
    version = reader.u32("version")
    if version in _VERSIONS:
        return version
    if version == 1:
        hint = "convert the model again with a current llama.cpp"
    elif int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
        raise UnsupportedError(
            f"{reader.path}: is a big-endian GGUF file",
            f"pip install gguf, then: gguf-convert-endian {reader.path} little",
        )
    else:
        hint = "versions 2 and 3 are read"
    raise UnsupportedError(f"{reader.path}: is GGUF version {version} (byte {at})", hint)


def _refuse_magic(path: Path, magic: bytes) -> NoReturn:
    if magic in _OTHER_FILES:
        kind, hint = _OTHER_FILES[magic]
        raise FileError(f"{path}: is not a GGUF file but {kind}", hint)
    raise FileError(
        f"{path}: is not a GGUF file: it starts with {magic!r} at byte 0",
        "a GGUF file starts with b'GGUF'",
    )


def _alignment(reader: ByteReader, metadata: Metadata) -> int:
    alignment = metadata.integer(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    is_power_of_two = alignment > 0 and alignment & (alignment - 1) == 0
    if is_power_of_two and _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT:
        return alignment
    found = f"is {alignment}, not a power of two from {_MIN_ALIGNMENT} to {_MAX_ALIGNMENT}"
    raise reader.fault(f"key {_ALIGNMENT_KEY}", found, metadata.offset(_ALIGNMENT_KEY))
