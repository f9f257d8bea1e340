"""How the CPU decodes Q4_0, see schedules/packed/q4_0.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.tir import Expr
from xpuc.schedules.packed.q4_0 import OFFSET


def sub_block(block: View, j: Expr) -> SubBlock:
    """The one sub-block of a block."""
    quants = block.quants("qs", j, bits=4)
    return SubBlock(block.lanes, quants, block.f32("d"), top=15, offset=OFFSET)
