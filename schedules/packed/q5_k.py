"""Q5_K: w = d * scale * q - dmin * min, blocks of 256 with 6-bit scales and mins for 32 columns.

`d f16 | dmin f16 | 12 bytes of scales and mins | 32 bytes of fifth bits | 128 bytes`. Scales and
mins are widened to bytes as in Q4_K, 2.3 % more than in the file.
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import bit_planes, halves, nibbles, pack_bits, scales_and_mins

COLUMNS, BYTES = 256, 176
PLANES = (
    Field("qs", "uint8", 160),
    Field("scales", "uint8", 8),
    Field("mins", "uint8", 8),
    Field("d", "float16", 1),
    Field("m", "float16", 1),
)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields; m is -dmin."""
    scales, mins = scales_and_mins(blocks[..., 4:16])
    quants = nibbles(blocks[..., 48:], 32) | bit_planes(blocks[..., 16:48]) << np.uint8(4)
    return {
        "qs": pack_bits(quants, 5),
        "scales": scales[..., None],
        "mins": mins[..., None],
        "d": halves(blocks, 0),
        "m": -halves(blocks, 2),
    }
