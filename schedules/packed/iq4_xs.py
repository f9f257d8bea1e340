"""IQ4_XS: w = d * (scale - 32) * VALUES[q], blocks of 256 with a 6-bit scale for every 32 columns.

`d f16 | 16 upper scale bits | 4 bytes of low scale nibbles | 128 bytes`, a byte holding columns i
and i + 16. The scales are widened to signed bytes, 1.5 % more than in the file.
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves
from xpuc.schedules.packed.iq4_nl import VALUES

__all__ = ["VALUES"]

COLUMNS, BYTES = 256, 136
PLANES = (Field("qs", "uint8", 128), Field("scales", "int8", 8), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1)
    high = np.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = low.reshape(*blocks.shape[:2], 8) | high.reshape(*blocks.shape[:2], 8) << np.uint8(4)
    return {
        "qs": blocks[..., 8:].reshape(*blocks.shape[:2], 32, 4),
        "scales": (scales.view(np.int8) - np.int8(32))[..., None],
        "d": halves(blocks, 0),
    }
