"""How the CPU decodes IQ4_NL, see schedules/packed/iq4_nl.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.tir import Expr
from xpuc.schedules.packed.iq4_nl import VALUES


def sub_block(block: View, j: Expr) -> SubBlock:
    """The one sub-block of a block."""
    nibbles = block.quants("qs", j, bits=4)
    quants = tuple(block.lookup(VALUES, q, 4 * block.lanes) for q in nibbles)
    return SubBlock(block.lanes, quants, block.f32("d"))
