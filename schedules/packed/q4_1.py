"""Q4_1: w = d * q + m, blocks of 32, `d f16 | m f16 | 16 bytes` with columns i and i + 16."""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves

COLUMNS, BYTES = 32, 20
PLANES = (Field("qs", "uint8", 16), Field("d", "float16", 1), Field("m", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    qs = blocks[..., 4:].reshape(*blocks.shape[:2], 4, 4)
    return {"qs": qs, "d": halves(blocks, 0), "m": halves(blocks, 2)}
