"""Q5_1: w = d * q + m, blocks of 32, `d f16 | m f16 | 4 of fifth bits | 16 bytes`."""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import fifth_bit, halves, nibbles, pack_bits

COLUMNS, BYTES = 32, 24
PLANES = (Field("qs", "uint8", 20), Field("d", "float16", 1), Field("m", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    quants = nibbles(blocks[..., 8:], 16) | fifth_bit(blocks[..., 4:8])
    return {"qs": pack_bits(quants, 5), "d": halves(blocks, 0), "m": halves(blocks, 2)}
