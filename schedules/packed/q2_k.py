"""Q2_K: w = d * scale * q - dmin * min, blocks of 256 with 4-bit scales and mins for 16 columns.

`16 bytes scale and min | 64 bytes | d f16 | dmin f16`; a byte of quants holds columns 32 apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import crumbs, halves, pack_bits

COLUMNS, BYTES = 256, 84
PLANES = (
    Field("qs", "uint8", 64),
    Field("scales", "uint16", 8),
    Field("d", "float16", 1),
    Field("m", "float16", 1),
)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields; m is -dmin."""
    return {
        "qs": pack_bits(crumbs(blocks[..., 16:80]), 2),
        "scales": _scales(blocks[..., :16])[..., None],
        "d": halves(blocks, 80),
        "m": -halves(blocks, 82),
    }


def _scales(packed: Bytes) -> NDArray[np.uint16]:
    """The two scales and mins of a sub-block in a word: second scale, first, first min, second."""
    first, second = packed[..., 0::2], packed[..., 1::2]
    low = second & np.uint8(15) | first << np.uint8(4)
    high = first >> np.uint8(4) | second & np.uint8(240)
    return low | high.astype(np.uint16) << np.uint16(8)
