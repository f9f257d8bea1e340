"""Small block stores for the tests of `runtime.store`, and blocks told apart by a number."""

from __future__ import annotations

import shutil
from pathlib import Path

import xxhash

from xpuc.runtime.extents import place_bytes
from xpuc.runtime.store import BlockStore

IDENTITY = b"a model, float16, a layout, rope"
BLOCK_BYTES = 40


def open_store(
    path: Path, n_places: int, *, identity: bytes = IDENTITY, block_bytes: int = BLOCK_BYTES
) -> BlockStore:
    max_bytes = n_places * place_bytes(block_bytes)
    return BlockStore.open(path, identity=identity, block_bytes=block_bytes, max_bytes=max_bytes)


def key_of(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(4, "little"))


def payload_of(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    pattern = xxhash.xxh3_128_digest(b"payload" + key_of(number))
    return (pattern * (block_bytes // len(pattern) + 1))[:block_bytes]


def put(store: BlockStore, *numbers: int) -> None:
    for number in numbers:
        store.put(key_of(number), payload_of(number))


def served(store: BlockStore, number: int, block_bytes: int = BLOCK_BYTES) -> bool:
    """Whether `get` serves a block; what it serves is right."""
    into = bytearray(block_bytes)
    found = store.get(key_of(number), into)
    assert not found or into == payload_of(number, block_bytes), f"wrong data for {number}"
    return found


def present(store: BlockStore, up_to: int) -> list[int]:
    """The numbers below `up_to` that the store says it contains."""
    return [number for number in range(up_to) if store.contains(key_of(number))]


def file_of(path: Path, name: str) -> Path:
    """A file of the only identity in the store at `path`."""
    (found,) = path.glob(f"*/{name}")
    return found


def lose_power(path: Path) -> None:
    """What another boot of the machine finds after a store that was not closed."""
    file_of(path, "state").write_bytes(b"another boot")


def as_killed(path: Path, copy: Path) -> Path:
    """What a process that opens the store finds if its owner is killed at this moment."""
    return Path(shutil.copytree(path, copy))
