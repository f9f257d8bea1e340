"""BF16: one number a block, kept as the upper half of an f32."""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields

COLUMNS, BYTES = 1, 2
PLANES = (Field("w", "uint16", 1),)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    return {"w": blocks.view(np.uint16)[..., None]}
