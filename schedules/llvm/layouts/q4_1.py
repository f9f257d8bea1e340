"""Q4_1: w = d * q + m, blocks of 32, `d f16 | m f16 | 16 bytes` with columns i and i + 16."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields, halves
from xpuc.schedules.llvm.tir import Expr

COLUMNS, BYTES = 32, 20
PLANES = (Field("qs", "uint8", 16), Field("d", "float16", 1), Field("m", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    qs = blocks[..., 4:].reshape(*blocks.shape[:2], 4, 4)
    return {"qs": qs, "d": halves(blocks, 0), "m": halves(blocks, 2)}


def sub_block(block: View, j: Expr) -> SubBlock:
    """The one sub-block of a block."""
    quants = block.quants("qs", j, bits=4)
    return SubBlock(block.lanes, quants, block.f32("d"), top=15, minimum=block.f32("m"))
