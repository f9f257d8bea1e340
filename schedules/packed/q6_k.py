"""Q6_K: w = d * scale * (q - 32), blocks of 256 with a signed byte as scale for every 16 columns.

`128 bytes of low nibbles | 64 bytes of upper bits | 16 scales | d f16`.
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import crumbs, halves, nibbles, pack_bits

COLUMNS, BYTES = 256, 210
OFFSET = 32
PLANES = (Field("qs", "uint8", 192), Field("scales", "int8", 16), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    quants = nibbles(blocks[..., :128], 64) | crumbs(blocks[..., 128:192]) << np.uint8(4)
    scales = blocks[..., 192:208].view(np.int8)[..., None]
    return {"qs": pack_bits(quants, 6), "scales": scales, "d": halves(blocks, 208)}
