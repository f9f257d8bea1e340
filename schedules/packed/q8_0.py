"""Q8_0: w = d * q, blocks of 32, `d f16 | 32 signed bytes`."""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields
from xpuc.schedules.packed.bits import halves

COLUMNS, BYTES = 32, 34
PLANES = (Field("qs", "int8", 32), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    qs = blocks[..., 2:].view(np.int8).reshape(*blocks.shape[:2], 8, 4)
    return {"qs": qs, "d": halves(blocks, 0)}
