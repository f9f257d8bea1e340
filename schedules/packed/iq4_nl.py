"""IQ4_NL: w = d * VALUES[q], blocks of 32, `d f16 | 16 bytes` with columns i and i + 16."""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves

COLUMNS, BYTES = 32, 18
PLANES = (Field("qs", "uint8", 16), Field("d", "float16", 1))
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    return {"qs": blocks[..., 2:].reshape(*blocks.shape[:2], 4, 4), "d": halves(blocks, 0)}
