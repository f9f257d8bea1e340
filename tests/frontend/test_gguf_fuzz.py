"""Damaged GGUF files: nothing but an XpucError comes out, in bounded memory."""

from __future__ import annotations

import math
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf_files as files
import pytest
from gguf_reader import Reader
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from xpuc.errors import UnsupportedError, XpucError
from xpuc.frontend.ggml_types import TYPES
from xpuc.frontend.gguf import GgufFile, open_gguf

BASE_BYTES = 32 << 20
EXTREMES = [0, 1, 2, 4, 5, 8, 9, 12, 13, 31, 99, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
EXTREMES += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]

BY_NAME = {known.name: known for known in TYPES.values()}

T = TypeVar("T")
Edits = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Header:
    """The bytes of a good file before its weights, and where its fields start."""

    content: bytes
    places: list[int]
    size_bytes: int  # of the whole file


def header_of(path: Path) -> Header:
    reader = Reader(path)
    places: set[int] = set()
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        at = field.offset
        for part in field.parts:
            places.add(at)
            at += part.nbytes
    content = path.read_bytes()[: reader.data_offset]
    return Header(content, sorted(places), path.stat().st_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def every_kind(folder: Path) -> Header:
    files.write_every_kind(folder / "every_kind.gguf")
    return header_of(folder / "every_kind.gguf")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Header:
    files.write_llama(folder / "llama.gguf")
    header = header_of(folder / "llama.gguf")
    assert len(header.content) > 64 << 10
    return header


# An edit names its place by a number that any header turns into one of its own: a byte within a
# field or, as damage there does more, the start of a field.
PLACES = st.tuples(st.sampled_from(["field", "field", "byte"]), st.integers(0, 2**32))
EDITS = st.one_of(
    st.tuples(st.just("write"), PLACES, st.sampled_from([1, 4, 8]), st.sampled_from(EXTREMES)),
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7), st.none()),
    st.tuples(st.just("cut"), PLACES, st.none(), st.none()),
    st.tuples(st.just("delete"), PLACES, st.integers(1, 64), st.none()),
    st.tuples(st.just("repeat"), PLACES, st.integers(1, 64), PLACES),
)


def damage(header: Header, edits: Edits) -> bytes:
    content = bytearray(header.content)

    def place(drawn: tuple[str, int]) -> int:
        kind, number = drawn
        at = header.places[number % len(header.places)] if kind == "field" else number
        return at % max(1, len(content))

    for name, where, amount, extra in edits:
        at = place(where)
        if name == "write":
            content[at : at + amount] = (extra % (1 << 8 * amount)).to_bytes(amount, "little")
        elif name == "flip" and content:
            content[at] ^= 1 << amount
        elif name == "cut":
            del content[at:]
        elif name == "delete":
            del content[at : at + amount]
        elif name == "repeat":
            source = place(extra)
            content[at:at] = content[source : source + amount]
    return bytes(content)


def assert_sound(model: GgufFile) -> None:
    """A damaged file that opens holds tensors which are whole and share no byte."""
    end = 0
    for tensor in model.tensors.values():
        known = BY_NAME[tensor.format]
        n_weights = math.prod(tensor.shape)
        assert tensor.data.nbytes * known.block_weights == n_weights * known.block_bytes
        assert tensor.offset >= end
        end = tensor.offset + tensor.data.nbytes
    assert end <= model.n_bytes


def assert_clear(error: XpucError, path: Path) -> None:
    """One printable line that names the file and, where it is damaged, the byte."""
    assert error.message.startswith(f"{path}: ")
    assert error.message.isprintable()
    assert len(error.message) < 500
    assert "byte" in error.message or isinstance(error, UnsupportedError)


def open_all(path: Path, *, strict: bool) -> str:
    """Opens and decodes everything; says what happened."""
    try:
        model = open_gguf(path, strict=strict)
    except XpucError as error:
        assert_clear(error, path)
        return type(error).__name__
    assert_sound(model)
    for key in model.metadata:
        try:
            model.metadata[key]
        except XpucError as error:
            assert_clear(error, path)
    return "opened"


def traced(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the most bytes that it held at a time."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check(path: Path, header: Header, edits: Edits) -> None:
    content = damage(header, edits)
    if not content:
        return
    path.unlink(missing_ok=True)  # the file of the last round may still be mapped
    path.write_bytes(content)
    if not any(name == "cut" for name, *_ in edits):
        os.truncate(path, header.size_bytes)  # the weights are a hole of zeros
    outcomes, peak = traced(lambda: {open_all(path, strict=s) for s in (False, True)})
    assert peak < BASE_BYTES + 8 * len(content)
    event(" and ".join(sorted(outcomes)))


FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck))
SOME_EDITS = st.lists(EDITS, min_size=1, max_size=4)


@settings(FUZZ, max_examples=60)
@given(edits=SOME_EDITS)
def test_damaged_file_with_every_kind(folder: Path, every_kind: Header, edits: Edits) -> None:
    check(folder / "model.gguf", every_kind, edits)


@pytest.mark.slow
@settings(FUZZ, max_examples=2000)
@given(edits=SOME_EDITS)
def test_much_damaged_file_with_every_kind(folder: Path, every_kind: Header, edits: Edits) -> None:
    check(folder / "model.gguf", every_kind, edits)


@pytest.mark.slow
@settings(FUZZ, max_examples=300)
@given(edits=SOME_EDITS)
def test_damaged_llama(folder: Path, llama: Header, edits: Edits) -> None:
    check(folder / "model.gguf", llama, edits)


@pytest.mark.slow
def test_every_field_overwritten_with_every_extreme(folder: Path, every_kind: Header) -> None:
    path = folder / "model.gguf"
    outcomes = Counter[str]()
    for at in every_kind.places:
        for extreme in EXTREMES:
            width = 8 if extreme >= 2**32 else 4
            edit = ("write", ("byte", at), width, extreme)
            path.unlink(missing_ok=True)
            path.write_bytes(damage(every_kind, [edit]))
            os.truncate(path, every_kind.size_bytes)
            outcomes[open_all(path, strict=False)] += 1
    assert set(outcomes) == {"opened", "FileError", "UnsupportedError"}


MANY = 1 << 16
CROWDED = {
    "entries": lambda: files.gguf_bytes([files.entry(f"{i:x}", 0, b"\1") for i in range(MANY)]),
    "tensors": lambda: files.gguf_bytes(
        [], [files.tensor(f"{i:x}", [1], 0, i * 32) for i in range(MANY)], data=bytes(MANY * 32)
    ),
    "strings": lambda: files.gguf_bytes(
        [files.entry("k", 9, files.array(8, MANY, files.text("Ā") * MANY))]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("crowd", CROWDED)
def test_crowded_file(folder: Path, crowd: str) -> None:
    content = CROWDED[crowd]()
    path = folder / f"{crowd}.gguf"
    path.write_bytes(content)
    outcome, peak = traced(lambda: open_all(path, strict=True))
    assert outcome == "opened"
    assert peak < BASE_BYTES + 8 * len(content)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Header:
    return header_of(smollm2_gguf)


@pytest.mark.slow
@pytest.mark.model
@settings(FUZZ, max_examples=25)
@given(edits=SOME_EDITS)
def test_damaged_smollm2(folder: Path, smollm2: Header, edits: Edits) -> None:
    check(folder / "model.gguf", smollm2, edits)


@pytest.mark.parametrize("content", [b"GGUF\3\0\0\0", b"\0", bytes(range(256)) * 64])
def test_an_unchanged_header_opens_and_noise_does_not(
    folder: Path, every_kind: Header, content: bytes
) -> None:
    path = folder / "model.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(damage(every_kind, []))
    os.truncate(path, every_kind.size_bytes)
    assert open_all(path, strict=True) == "opened"
    path.unlink()
    path.write_bytes(content)
    assert open_all(path, strict=True) == "FileError"
