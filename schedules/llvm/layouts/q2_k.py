"""How the CPU decodes Q2_K, see schedules/packed/q2_k.py."""

from __future__ import annotations

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.tir import Expr, T


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8.

    The quants of its second half stay where two bits are below them, so they and the first factor
    are taken four times, and the scale as a quarter.
    """
    lanes = block.lanes

    def four_bits(start: int, mask: int = 15) -> Expr:
        value = T.shift_right(word, tir.const(start, "int32", lanes)) if start else word
        return tir.let(value & tir.const(mask, "int32", lanes))

    word = block.int32("scales", j)
    return SubBlock(
        lanes,
        block.quants("qs", j, bits=2, raised=2),
        tir.let(block.f32("d") * tir.const(0.25, "float32", lanes)),
        top=12,
        factors=(four_bits(2, mask=60), four_bits(0)),
        minimum=block.f32("m"),
        min_factors=(four_bits(8), four_bits(12)),
    )
