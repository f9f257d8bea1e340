"""How the CPU decodes Q8_0, see schedules/packed/q8_0.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.tir import Expr


def sub_block(block: View, j: Expr) -> SubBlock:
    """The one sub-block of a block."""
    return SubBlock(block.lanes, block.bytes("qs", j), block.f32("d"))
