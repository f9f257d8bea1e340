"""The bits of packed blocks taken apart and put together again, for every target's layout.

A field of a block is a number of units, and an element of fewer than 8 bits shares its unit's 4
bytes with others (`PIECES`), so that most of a sub-block's 8 vectors are taken out with one `and`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xpuc.ir.activation import Q8_BLOCK

COLUMNS = Q8_BLOCK  # columns of a sub-block

Bytes = NDArray[np.uint8]
Fields = dict[str, NDArray[np.generic]]  # name -> (rows, blocks, units, width)


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


def halves(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The f16 at byte `start` of every block, as a field."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., None]
