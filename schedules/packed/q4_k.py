"""Q4_K: w = d * scale * q - dmin * min, blocks of 256 with 6-bit scales and mins for 32 columns.

`d f16 | dmin f16 | 12 bytes of scales and mins | 128 bytes`, a byte holding columns 32 apart. With
scales and mins of a byte each it takes 2.8 % more than in the file.
"""

from __future__ import annotations

from xpuc.schedules.packed import Bytes, Fields, _scaled_mins
from xpuc.schedules.packed.bits import nibbles

COLUMNS, BYTES = _scaled_mins.COLUMNS, 144
PLANES = _scaled_mins.planes(bits=4)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields; m is -dmin."""
    return _scaled_mins.fields(blocks, nibbles(blocks[..., 16:], 32), bits=4)
