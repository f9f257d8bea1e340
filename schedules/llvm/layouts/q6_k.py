"""Q6_K: w = d * scale * (q - 32), blocks of 256 with a signed byte as scale for every 16 columns.

`128 bytes of low nibbles | 64 bytes of upper bits | 16 scales | d f16`.
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields, crumbs, halves, nibbles, pack_bits
from xpuc.schedules.llvm.tir import Expr

COLUMNS, BYTES = 256, 210
PLANES = (Field("qs", "uint8", 192), Field("scales", "int8", 16), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    quants = nibbles(blocks[..., :128], 64) | crumbs(blocks[..., 128:192]) << np.uint8(4)
    scales = blocks[..., 192:208].view(np.int8)[..., None]
    return {"qs": pack_bits(quants, 6), "scales": scales, "d": halves(blocks, 208)}


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8."""
    d = block.f32("d")
    quants = block.quants("qs", j, bits=6)
    factors = block.int32("scales", 2 * j), block.int32("scales", 2 * j + 1)
    return SubBlock(block.lanes, quants, d, top=63, offset=32, factors=factors)
