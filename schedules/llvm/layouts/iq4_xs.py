"""How the CPU decodes IQ4_XS, see schedules/packed/iq4_xs.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.tir import Expr
from xpuc.schedules.packed.iq4_nl import VALUES


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8."""
    d = block.f32("d")
    nibbles = block.quants("qs", j, bits=4)
    quants = tuple(block.lookup(VALUES, q, 4 * block.lanes) for q in nibbles)
    factor = block.int32("scales", j)
    return SubBlock(block.lanes, quants, d, factors=(factor, factor))
