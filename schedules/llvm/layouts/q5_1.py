"""Q5_1: w = d * q + m, blocks of 32, `d f16 | m f16 | 4 of fifth bits | 16 bytes`."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields, fifth_bit, halves, nibbles, pack_bits
from xpuc.schedules.llvm.tir import Expr

COLUMNS, BYTES = 32, 24
PLANES = (Field("qs", "uint8", 20), Field("d", "float16", 1), Field("m", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    quants = nibbles(blocks[..., 8:], 16) | fifth_bit(blocks[..., 4:8])
    return {"qs": pack_bits(quants, 5), "d": halves(blocks, 0), "m": halves(blocks, 2)}


def sub_block(block: View, j: Expr) -> SubBlock:
    """The one sub-block of a block."""
    quants = block.quants("qs", j, bits=5)
    return SubBlock(block.lanes, quants, block.f32("d"), top=31, minimum=block.f32("m"))
