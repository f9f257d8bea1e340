"""Q5_K: w = d * scale * q - dmin * min, blocks of 256 with 6-bit scales and mins for 32 columns.

`d f16 | dmin f16 | 12 bytes of scales and mins | 32 bytes of fifth bits | 128 bytes`. With scales
and mins of a byte each it takes 2.3 % more than in the file.
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Fields, _scaled_mins
from xpuc.schedules.packed.bits import bit_planes, nibbles

COLUMNS, BYTES = _scaled_mins.COLUMNS, 176
PLANES = _scaled_mins.planes(bits=5)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields; m is -dmin."""
    quants = nibbles(blocks[..., 48:], 32) | bit_planes(blocks[..., 16:48]) << np.uint8(4)
    return _scaled_mins.fields(blocks, quants, bits=5)
