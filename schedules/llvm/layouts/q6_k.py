"""How the CPU decodes Q6_K, see schedules/packed/q6_k.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.tir import Expr
from xpuc.schedules.packed.q6_k import OFFSET


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8."""
    d = block.f32("d")
    quants = block.quants("qs", j, bits=6)
    factors = block.int32("scales", 2 * j), block.int32("scales", 2 * j + 1)
    return SubBlock(block.lanes, quants, d, top=63, offset=OFFSET, factors=factors)
