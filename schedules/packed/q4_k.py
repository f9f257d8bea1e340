"""Q4_K: w = d * scale * q - dmin * min, blocks of 256 with 6-bit scales and mins for 32 columns.

`d f16 | dmin f16 | 12 bytes of scales and mins | 128 bytes`, a byte holding columns 32 apart.
Scales and mins are widened to bytes, 2.8 % more than in the file: taking them apart costs more time
than reading them.
"""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves, nibbles, pack_bits, scales_and_mins

COLUMNS, BYTES = 256, 144
PLANES = (
    Field("qs", "uint8", 128),
    Field("scales", "uint8", 8),
    Field("mins", "uint8", 8),
    Field("d", "float16", 1),
    Field("m", "float16", 1),
)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields; m is -dmin."""
    scales, mins = scales_and_mins(blocks[..., 4:16])
    return {
        "qs": pack_bits(nibbles(blocks[..., 16:], 32), 4),
        "scales": scales[..., None],
        "mins": mins[..., None],
        "d": halves(blocks, 0),
        "m": -halves(blocks, 2),
    }
