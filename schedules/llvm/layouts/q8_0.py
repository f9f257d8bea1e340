"""Q8_0: w = d * q, blocks of 32, `d f16 | 32 signed bytes`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields, halves

COLUMNS, BYTES = 32, 34
PLANES = (Field("qs", "int8", 32), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    qs = blocks[..., 2:].view(np.int8).reshape(*blocks.shape[:2], 8, 4)
    return {"qs": qs, "d": halves(blocks, 0)}


def sub_blocks(block: View) -> Iterator[SubBlock]:
    """A block is one sub-block."""
    yield SubBlock(block.lanes, block.bytes("qs", 0), block.f32("d"))
