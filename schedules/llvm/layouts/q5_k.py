"""How the CPU decodes Q5_K, see schedules/packed/q5_k.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import SubBlock, View, scaled_and_shifted
from xpuc.schedules.llvm.tir import Expr


def sub_block(block: View, j: Expr) -> SubBlock:
    """Sub-block j of 8."""
    return scaled_and_shifted(block, j, bits=5)
