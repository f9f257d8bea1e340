"""Q2_K: w = d * scale * q - dmin * min, blocks of 256 with 4-bit scales and mins for 16 columns.

`16 bytes scale and min | 64 bytes | d f16 | dmin f16`; a byte of quants holds columns 32 apart.
"""

from __future__ import annotations

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import Factors, SubBlock, View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields, crumbs, halves, pack_bits
from xpuc.schedules.llvm.tir import Expr, T

COLUMNS, BYTES = 256, 84
PLANES = (
    Field("qs", "uint8", 64),
    Field("scales", "uint8", 16),
    Field("d", "float16", 1),
    Field("m", "float16", 1),
)


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields; m is -dmin."""
    return {
        "qs": pack_bits(crumbs(blocks[..., 16:80]), 2),
        "scales": blocks[..., :16].reshape(*blocks.shape[:2], 8, 2),
        "d": halves(blocks, 80),
        "m": -halves(blocks, 82),
    }


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8."""
    d, m = block.f32("d"), block.f32("m")
    both = tir.let(block.load("scales", 2 * j, 2))
    low = both & tir.const(15, "uint8", 2 * block.lanes)
    high = T.shift_right(both, tir.const(4, "uint8", 2 * block.lanes))
    quants = block.quants("qs", j, bits=2)
    return SubBlock(
        block.lanes,
        quants,
        d,
        top=3,
        factors=Factors(low, 2),
        minimum=m,
        min_factors=Factors(high, 2),
    )
