"""Malformed GGUF files: each is refused with the file, the key or tensor, and the byte."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from gguf_files import array, entry, gguf_bytes, tensor, text, write_every_kind

from xpuc.errors import FileError, UnsupportedError, XpucError
from xpuc.frontend.gguf import open_gguf

HUGE = 2**64 - 1

# A metadata entry starts at byte 24; with the key "k" its kind is at 33 and its value at 37. With
# no metadata the directory of tensors starts at byte 24; of a tensor "t" the number of dimensions
# is at 33, the type of one with one dimension at 45, and its data start at byte 64.
METADATA: dict[str, tuple[bytes, str]] = {
    "more entries than bytes": (
        gguf_bytes(n_entries=HUGE),
        f"metadata of {HUGE} entries at byte 24: needs {HUGE * 14} bytes, but 264 are left",
    ),
    "more entries than there are": (
        gguf_bytes([entry("k", 0, b"\1")], n_entries=2, data=None),
        "metadata of 2 entries at byte 24: needs 28 bytes, but 14 are left",
    ),
    "key without bytes": (
        gguf_bytes([entry("", 0, bytes(8))]),
        "metadata entry 0 at byte 24: its name has 0 bytes, not 1 to 65535",
    ),
    "key of 2^64 bytes": (
        gguf_bytes([struct.pack("<Q", HUGE)], n_entries=1),
        f"metadata entry 0 at byte 24: its name has {HUGE} bytes, not 1 to 65535",
    ),
    "key past the end": (
        gguf_bytes([struct.pack("<Q", 1000)], n_entries=1),
        "metadata entry 0 at byte 32: needs 1000 bytes, but 256 are left",
    ),
    "key not UTF-8": (
        gguf_bytes([entry(b"ab\xff", 0, b"\1")]),
        "metadata entry 0 at byte 34: is not UTF-8",
    ),
    "key with a line break": (
        gguf_bytes([entry("a\nb", 99, b"\1")]),
        r"key 'a\nb' at byte 35: has the unknown kind 99",
    ),
    "second key": (
        gguf_bytes([entry("k", 0, b"\1"), entry("k", 0, b"\1")]),
        "key k at byte 38: is there a second time",
    ),
    "unknown kind": (
        gguf_bytes([entry("k", 13, b"\1")]),
        "key k at byte 33: has the unknown kind 13",
    ),
    "unknown kind of elements": (
        gguf_bytes([entry("k", 9, array(2**32 - 1, 0))]),
        "key k at byte 37: has the unknown kind 4294967295",
    ),
    "number past the end": (
        gguf_bytes([entry("kk", 12, bytes(7))], data=None),
        "key kk at byte 38: needs 8 bytes, but 7 are left",
    ),
    "string past the end": (
        gguf_bytes([entry("k", 8, struct.pack("<Q", 2**63))]),
        f"key k at byte 45: needs {2**63} bytes, but 275 are left",
    ),
    "array past the end": (
        gguf_bytes([entry("k", 9, array(4, 2**62))]),
        f"key k at byte 49: needs {2**64} bytes, but 271 are left",
    ),
    "array of too many strings": (
        gguf_bytes([entry("k", 9, array(8, 2**61))]),
        f"key k at byte 49: needs {2**64} bytes, but 271 are left",
    ),
    "string of an array past the end": (
        gguf_bytes([entry("k", 9, array(8, 2, text("a") + struct.pack("<Q", HUGE)))]),
        f"key k[1] at byte 66: needs {HUGE} bytes, but 286 are left",
    ),
    "string of an array cut inside its length": (
        gguf_bytes([entry("k", 9, array(8, 2, text(bytes(11)) + b"\1\0"))], data=None),
        "key k[1] at byte 68: the file ends inside its length",
    ),
    "second entry past the end": (
        gguf_bytes([entry("k" * 40, 0, b"\1")], n_entries=3, data=None),
        "metadata entry 1 at byte 77: needs 14 bytes, but 0 are left",
    ),
    "boolean of 2": (
        gguf_bytes([entry("k", 7, b"\2")]),
        "key k at byte 37: is a boolean that is neither 0 nor 1",
    ),
    "boolean of 255 in an array": (
        gguf_bytes([entry("k", 9, array(7, 3, b"\1\0\xff"))]),
        "key k at byte 51: is a boolean that is neither 0 nor 1",
    ),
    "alignment of 0": (
        gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 0))]),
        "key general.alignment at byte 53: is 0, not a power of two from 8 to 1048576",
    ),
    "alignment of 48": (
        gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 48))]),
        "key general.alignment at byte 53: is 48, not a power of two from 8 to 1048576",
    ),
    "alignment of 2^31": (
        gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 2**31))]),
        f"key general.alignment at byte 53: is {2**31}, not a power of two from 8 to 1048576",
    ),
    "alignment that is a string": (
        gguf_bytes([entry("general.alignment", 8, text("32"))]),
        "key general.alignment at byte 53: is string, not an integer",
    ),
}

TENSORS: dict[str, tuple[bytes, str]] = {
    "more tensors than bytes": (
        gguf_bytes(n_tensors=2**63),
        f"directory of {2**63} tensors at byte 24: needs {2**63 * 25} bytes, but 264 are left",
    ),
    "name without bytes": (
        gguf_bytes([], [tensor("", [4], 0)]),
        "tensor entry 0 at byte 24: its name has 0 bytes, not 1 to 64",
    ),
    "name of 65 bytes": (
        gguf_bytes([], [tensor("t" * 65, [4], 0)]),
        "tensor entry 0 at byte 24: its name has 65 bytes, not 1 to 64",
    ),
    "name not UTF-8": (
        gguf_bytes([], [tensor(b"\xc3\x28", [4], 0)]),
        "tensor entry 0 at byte 32: is not UTF-8",
    ),
    "second tensor": (
        gguf_bytes([], [tensor("t", [4], 0), tensor("t", [4], 0, 32)]),
        "tensor t at byte 57: is there a second time",
    ),
    "5 dimensions": (
        gguf_bytes([], [tensor("t", [1] * 5, 0)]),
        "tensor t at byte 33: has 5 dimensions, more than 4",
    ),
    "2^32 - 1 dimensions": (
        gguf_bytes([], [text("t") + struct.pack("<I", 2**32 - 1)], n_tensors=1),
        "tensor t at byte 33: has 4294967295 dimensions, more than 4",
    ),
    "dimension of 0": (
        gguf_bytes([], [tensor("t", [4, 0], 0)]),
        "tensor t at byte 33: has a dimension of 0 in [4, 0]",
    ),
    "dimensions that overflow": (
        gguf_bytes([], [tensor("t", [2**32, 2**32], 0)]),
        f"tensor t at byte 33: has too many weights: [{2**32}, {2**32}] overflows",
    ),
    "dimension that is negative as int64": (
        gguf_bytes([], [tensor("t", [HUGE], 0)]),
        f"tensor t at byte 33: has too many weights: [{HUGE}] overflows",
    ),
    "part of a block": (
        gguf_bytes([], [tensor("t", [288], 12)]),
        "tensor t at byte 24: has rows of 288 weights, but Q4_K has blocks of 256",
    ),
    "block without dimensions": (
        gguf_bytes([], [tensor("t", [], 2)]),
        "tensor t at byte 24: has rows of 1 weights, but Q4_0 has blocks of 32",
    ),
    "offset not aligned": (
        gguf_bytes([], [tensor("t", [4], 0, 16)]),
        "tensor t at byte 24: has offset 16, not a multiple of 32",
    ),
    "offsets that overlap": (
        gguf_bytes([], [tensor("a", [16], 0), tensor("b", [4], 0, 32)]),
        "tensor b at byte 57: has offset 32 and overlaps tensor a",
    ),
    "offsets out of order": (
        gguf_bytes([], [tensor("a", [4], 0, 32), tensor("b", [4], 0, 0)]),
        "tensor b at byte 57: has offset 0 and lies before tensor a",
    ),
    "data past the end": (
        gguf_bytes([], [tensor("t", [65], 0)]),
        "tensor t at byte 64: needs 260 bytes, but the file ends at byte 320",
    ),
    "offset past the end": (
        gguf_bytes([], [tensor("t", [4], 0, 2**64 - 32)]),
        f"tensor t at byte {2**64 + 32}: needs 16 bytes, but the file ends at byte 320",
    ),
}


def refusal(path: Path) -> XpucError:
    with pytest.raises(XpucError) as caught:
        open_gguf(path)
    return caught.value


@pytest.mark.parametrize("name", METADATA | TENSORS)
def test_malformed(tmp_path: Path, name: str) -> None:
    content, wanted = (METADATA | TENSORS)[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error = refusal(path)
    assert type(error) is FileError
    assert error.message == f"{path}: {wanted}"
    assert "download or convert it again" in error.hint


UNSUPPORTED: dict[str, tuple[bytes, str, str]] = {
    "version 1": (gguf_bytes(version=1), "is GGUF version 1 (byte 4)", "convert the model again"),
    "version 4": (gguf_bytes(version=4), "is GGUF version 4 (byte 4)", "versions 2 and 3 are read"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "is a big-endian GGUF file",
        "gguf-convert-endian",
    ),
    "array of arrays": (
        gguf_bytes([entry("k", 9, array(9, 1, array(0, 0)))]),
        "key k at byte 37: is an array of arrays",
        "numbers, booleans and strings",
    ),
    "unknown type": (
        gguf_bytes([], [tensor("t", [4], 1000)]),
        "tensor t at byte 45: has the unknown type id 1000",
        "supported: F32 F16",
    ),
    "too many entries": (
        gguf_bytes(n_entries=65537, data=bytes(1 << 20)),
        "has metadata of 65537 entries",
        "at most 65536",
    ),
    "too many tensors": (
        gguf_bytes(n_tensors=65537, data=bytes(2 << 20)),
        "has a directory of 65537 tensors",
        "at most 65536",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(tmp_path: Path, name: str) -> None:
    content, message, hint = UNSUPPORTED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error = refusal(path)
    assert type(error) is UnsupportedError
    assert error.message == f"{path}: {message}"
    assert hint in error.hint


OTHER_FILES = {
    b"": "is empty",
    b"GG": "is not a GGUF file: it starts with b'GG' at byte 0",
    b"\x08\0\0\0\0\0\0\0{}": "is not a GGUF file: it starts with b'\\x08\\x00\\x00\\x00' at byte 0",
    b"tjgg\3\0\0\0": "is not a GGUF file but a GGJT file from before GGUF",
    b"PK\x03\x04": "is not a GGUF file but a zip archive, perhaps a PyTorch checkpoint",
    b"version https://git-lfs": "is not a GGUF file but a Git LFS pointer, perhaps",
}


@pytest.mark.parametrize("content", OTHER_FILES)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error = refusal(path)
    assert type(error) is FileError
    assert error.message == f"{path}: {OTHER_FILES[content]}"


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path).message == f"{tmp_path}: is a directory"
    missing = tmp_path / "no.gguf"
    assert refusal(missing).message == f"{missing}: No such file or directory"
    assert "embedded null byte" in refusal(Path("a\0b")).message
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe").message == f"{tmp_path / 'pipe'}: is not a regular file"


def test_a_string_that_is_not_utf8_is_refused_when_asked_for(tmp_path: Path) -> None:
    tokens = array(8, 3, text("a") + text(b"b\xe9c") + text("d"))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([entry("k", 8, text(b"ok\xf0")), entry("tokens", 9, tokens)]))
    metadata = open_gguf(path).metadata
    with pytest.raises(FileError) as caught:
        metadata["k"]
    assert caught.value.message == f"{path}: key k at byte 47: is not UTF-8"
    with pytest.raises(FileError) as caught:
        metadata["tokens"]
    at = path.read_bytes().index(b"\xe9")
    assert caught.value.message == f"{path}: key tokens[1] at byte {at}: is not UTF-8"


def test_long_names_are_cut_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([entry("k" * 5000, 99, b"")]))
    assert f"key {'k' * 77}... at byte 5032" in refusal(path).message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_every_kind(whole)
    model, content = open_gguf(whole), whole.read_bytes()
    data_start = min(tensor.offset for tensor in model.tensors.values())
    data_end = max(tensor.offset + tensor.data.nbytes for tensor in model.tensors.values())
    for end in [*range(data_start), *range(data_start, data_end, 97), data_end - 1]:
        path = tmp_path / f"{end}.gguf"
        path.write_bytes(content[:end])
        error = refusal(path)
        assert type(error) is FileError
        assert " at byte " in error.message or end == 0
    path.write_bytes(content[:data_end])  # only the padding of the last tensor is gone
    assert list(open_gguf(path).tensors) == list(model.tensors)
