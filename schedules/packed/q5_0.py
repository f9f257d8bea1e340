"""Q5_0: w = d * (q - 16), blocks of 32, `d f16 | 4 bytes of fifth bits | 16 bytes`."""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import fifth_bit, halves, nibbles, pack_bits

COLUMNS, BYTES = 32, 22
OFFSET = 16
PLANES = (Field("qs", "uint8", 20), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    quants = nibbles(blocks[..., 6:], 16) | fifth_bit(blocks[..., 2:6])
    return {"qs": pack_bits(quants, 5), "d": halves(blocks, 0)}
