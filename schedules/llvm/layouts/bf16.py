"""BF16: 8 rows interleaved column by column, kept as the upper halves of f32 numbers."""

from __future__ import annotations

import numpy as np

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields
from xpuc.schedules.llvm.tir import Expr, T

COLUMNS, BYTES = 1, 2
PLANES = (Field("w", "uint16", 1),)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    return {"w": blocks.view(np.uint16)[..., None]}


def value(block: View) -> Expr:
    """One column."""
    word = tir.cast(block.load("w", 0, 1), "int32", block.lanes)
    word = T.shift_left(word, tir.const(16, "int32", block.lanes))
    return tir.let(tir.bits(word, "float32", block.lanes))
