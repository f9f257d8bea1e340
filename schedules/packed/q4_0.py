"""Q4_0: w = d * (q - 8), blocks of 32, `d f16 | 16 bytes`, a byte holding columns i and i + 16."""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves

COLUMNS, BYTES = 32, 18
OFFSET = 8
PLANES = (Field("qs", "uint8", 16), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    return {"qs": blocks[..., 2:].reshape(*blocks.shape[:2], 4, 4), "d": halves(blocks, 0)}
