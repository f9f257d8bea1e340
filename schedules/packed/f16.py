"""F16: one number a block."""

from __future__ import annotations

import numpy as np

from xpuc.schedules.packed import Bytes, Field, Fields

COLUMNS, BYTES = 1, 2
PLANES = (Field("w", "float16", 1),)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    return {"w": blocks.view(np.float16)[..., None]}
