"""What Q4_K and Q5_K have alike: 6-bit scales and mins of 8 sub-blocks, in the first 16 bytes.

`d f16 | dmin f16 | 12 bytes of scales and mins`. Scales and mins are widened to bytes: taking them
apart in a kernel costs more time than reading them.
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves, pack_bits

COLUMNS = 256


def planes(bits: int) -> tuple[Field, ...]:
    """Those of a format with elements of `bits` bits."""
    return (
        Field("qs", "uint8", COLUMNS // 8 * bits),
        Field("scales", "uint8", 8),
        Field("mins", "uint8", 8),
        Field("d", "float16", 1),
        Field("m", "float16", 1),
    )


def fields(blocks: Bytes, quants: Bytes, bits: int) -> Fields:
    """Bytes of blocks, and their elements of `bits` bits, to fields; m is -dmin."""
    scales, mins = _scales_and_mins(blocks[..., 4:16])
    return {
        "qs": pack_bits(quants, bits),
        "scales": scales[..., None],
        "mins": mins[..., None],
        "d": halves(blocks, 0),
        "m": -halves(blocks, 2),
    }


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 mins of 6 bits that are stored in 12 bytes."""
    first, second, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, low & 15 | first >> 2 & 48], axis=-1)
    mins = np.concatenate([second & 63, low >> 4 | second >> 2 & 48], axis=-1)
    return scales, mins
