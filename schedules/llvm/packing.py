"""Packed weights on a CPU: 8 rows interleaved, each field of a block in a plane of its own.

A plane is an array that holds, for every group of 8 rows and every block, the field's units one
after the other, and each unit row by row: `[rows / 8][blocks][units][8 rows][width]`. A unit of 4
bytes makes a 32-byte vector whose byte `row * 4 + t` belongs to column `4 v + t`, which is what
byte dot products want.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xpuc.ir.activation import Q8_BLOCK

ROWS = 8  # rows of a group
COLUMNS = Q8_BLOCK  # columns of a sub-block
ALIGNMENT = 64  # bytes a plane is a multiple of
_CHUNK_BYTES = 1 << 20  # packed at a time, so that temporaries stay in the cache

Bytes = NDArray[np.uint8]
Fields = dict[str, NDArray[np.generic]]  # name -> (rows, blocks, units, width)


@dataclass(frozen=True)
class Field:
    """What a block stores of one row in one plane: `per_block` elements."""

    name: str
    dtype: str
    per_block: int


@dataclass(frozen=True)
class Plane:
    """An array of a packed weight: `size` elements, padding included."""

    name: str
    dtype: str
    size: int


# Where the 8 vectors of a sub-block stand when an element takes fewer than 8 bits: vector v is made
# of pieces (byte of the unit, its lowest bit there, number of bits), lowest bits first. Whole bytes
# are spent, and as many vectors as possible are one piece at bit 0, which costs a single `and` to
# take out.
PIECES: dict[int, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    2: tuple(((v % 2, v // 4 * 2 + v // 2 % 2 * 4, 2),) for v in range(8)),
    3: (
        *(((v // 2, v % 2 * 3, 3),) for v in range(6)),
        ((0, 6, 2), (2, 6, 1)),
        ((1, 6, 2), (2, 7, 1)),
    ),
    4: tuple(((v % 4, v // 4 * 4, 4),) for v in range(8)),
    5: (
        *(((v, 0, 5),) for v in range(5)),
        ((0, 5, 3), (1, 6, 2)),
        ((2, 5, 3), (3, 6, 2)),
        ((4, 5, 3), (1, 5, 1), (3, 5, 1)),
    ),
    6: (
        *(((v, 0, 6),) for v in range(6)),
        ((0, 6, 2), (1, 6, 2), (2, 6, 2)),
        ((3, 6, 2), (4, 6, 2), (5, 6, 2)),
    ),
}


def pack_bits(quants: Bytes, bits: int) -> Bytes:
    """Elements (rows, blocks, columns) of `bits` bits each to units (rows, blocks, units, 4).

    Works on 4 bytes at a time: shifted bits that enter a neighbour are masked out.
    """
    rows, blocks, columns = quants.shape
    words = np.ascontiguousarray(quants).view(np.uint32).reshape(-1, 8)
    packed = np.zeros((len(words), bits), np.uint32)
    for v, pieces in enumerate(PIECES[bits]):
        taken = 0
        for byte, low, count in pieces:
            mask = np.uint32(((1 << count) - 1 << taken) * 0x01010101)
            packed[:, byte] |= (words[:, v] & mask) << np.uint32(low - taken)
            taken += count
    return packed.view(np.uint8).reshape(rows, blocks, columns // COLUMNS * bits, 4)


def nibbles(packed: Bytes, run: int) -> Bytes:
    """4-bit elements: of every `run` bytes first the low nibbles, then the high ones."""
    return _slices(packed, run, 4)


def crumbs(packed: Bytes) -> Bytes:
    """2-bit elements: of every 32 bytes first the lowest crumbs, then the next."""
    return _slices(packed, 32, 2)


def _slices(packed: Bytes, run: int, bits: int) -> Bytes:
    words = np.ascontiguousarray(packed).view(np.uint64)
    words = words.reshape(*packed.shape[:2], -1, run // 8)
    mask = np.uint64(((1 << bits) - 1) * 0x0101010101010101)
    out = np.empty((*words.shape[:3], 8 // bits, run // 8), np.uint64)
    for i in range(8 // bits):
        out[..., i, :] = words >> np.uint64(i * bits) & mask
    return out.view(np.uint8).reshape(*packed.shape[:2], -1)


def bit_planes(packed: Bytes) -> Bytes:
    """Single bits of 256 columns from 32 bytes: bit j of byte i is column 32 j + i."""
    return _slices(packed, 32, 1)


def fifth_bit(packed: Bytes) -> Bytes:
    """The bits of 32 columns from 4 bytes, lowest first, in place 4."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 mins of 6 bits that Q4_K and Q5_K store in 12 bytes."""
    first, second, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, low & 15 | first >> 2 & 48], axis=-1)
    mins = np.concatenate([second & 63, low >> 4 | second >> 2 & 48], axis=-1)
    return scales, mins


def halves(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The f16 at byte `start` of every block, as a field."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., None]


def interleave(field: NDArray[np.generic], out: NDArray[np.generic]) -> None:
    """Write a field (rows, blocks, units, width) of whole row groups into its part of the plane."""
    rows, blocks, units, width = field.shape
    word = f"u{width * field.dtype.itemsize}"
    words = np.ascontiguousarray(field).view(word).reshape(rows // ROWS, ROWS, blocks * units)
    lanes = out.view(word).reshape(rows // ROWS, blocks * units, ROWS)
    for row in range(ROWS):  # faster than one transposed copy, whose inner loop numpy makes short
        lanes[:, :, row] = words[:, row]


def padded_size(elements: int, dtype: str) -> int:
    """`elements` rounded up to whole multiples of ALIGNMENT bytes."""
    step = ALIGNMENT // np.dtype(dtype).itemsize
    return -(-elements // step) * step


def row_chunks(raw: Bytes) -> list[tuple[int, Bytes]]:
    """Raw rows (rows, row_bytes) in runs of whole groups, the last one filled up with zero rows.

    Each comes with the number of its first group.
    """
    rows, row_bytes = raw.shape
    step = max(1, _CHUNK_BYTES // max(1, row_bytes * ROWS)) * ROWS
    return [
        (start // ROWS, _whole_groups(raw[start : start + step])) for start in range(0, rows, step)
    ]


def _whole_groups(raw: Bytes) -> Bytes:
    missing = -len(raw) % ROWS
    return np.pad(raw, ((0, missing), (0, 0))) if missing else raw
