"""Q3_K: w = d * (scale - 32) * (q - 4), blocks of 256 with a 6-bit scale for every 16 columns.

`32 bytes of third bits | 64 bytes | 12 bytes of scales | d f16`. The scales are regrouped but stay
12 bytes: byte j has the low nibbles of sub-block j's two scales, byte 8 + j % 4 their upper bits,
from bit 4 (j / 4).
"""

from __future__ import annotations

import numpy as np

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import Factors, SubBlock, View
from xpuc.schedules.llvm.packing import Bytes, Field, Fields, bit_planes, crumbs, halves, pack_bits
from xpuc.schedules.llvm.tir import Expr, T

COLUMNS, BYTES = 256, 110
PLANES = (Field("qs", "uint8", 96), Field("scales", "uint8", 12), Field("d", "float16", 1))


def fields(blocks: Bytes) -> Fields:
    """Bytes of blocks to fields."""
    quants = crumbs(blocks[..., 32:96]) | bit_planes(blocks[..., :32]) << np.uint8(2)
    return {
        "qs": pack_bits(quants, 3),
        "scales": _scales(blocks[..., 96:108])[..., None],
        "d": halves(blocks, 108),
    }


def _scales(packed: Bytes) -> Bytes:
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    lows = low[..., 0::2] | low[..., 1::2] << 4
    pairs = high[..., 0::2] | high[..., 1::2] << 2
    return np.concatenate([lows, pairs[..., :4] | pairs[..., 4:] << 4], axis=-1)


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8."""
    d = block.f32("d")
    quants = block.quants("qs", j, bits=3)
    return SubBlock(block.lanes, quants, d, top=7, offset=4, factors=_factors(block, j))


def _factors(block: View, j: Expr) -> Factors:
    lanes = block.lanes

    def c(value: int) -> Expr:
        return tir.const(value, "uint16", lanes)

    upper = tir.splat(tir.cast((j >> 2) * 4, "uint16"), lanes)

    low = tir.let(tir.cast(block.load("scales", j, 1), "uint16", lanes))
    high = tir.let(tir.cast(block.load("scales", 8 + (j & 3), 1), "uint16", lanes))
    high = tir.let(T.shift_right(high, upper))
    low = (low | T.shift_left(low, c(4))) & c(0x0F0F)
    high = (high | T.shift_left(high, c(6))) & c(0x0303)
    scales = tir.bits(low | T.shift_left(high, c(4)), "int8", 2 * lanes)
    return Factors(tir.let(scales - tir.const(32, "int8", 2 * lanes)), 2)
