"""F16: 8 rows interleaved column by column."""

from __future__ import annotations

import numpy as np

from xpuc.schedules.llvm.blocks import View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields
from xpuc.schedules.llvm.tir import Expr

COLUMNS, BYTES = 1, 2
PLANES = (Field("w", "float16", 1),)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    return {"w": blocks.view(np.float16)[..., None]}


def value(block: View) -> Expr:
    """One column."""
    return block.f32("w")
