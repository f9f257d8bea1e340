"""How the CPU decodes BF16, see schedules/packed/bf16.py."""

from __future__ import annotations

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import View
from xpuc.schedules.llvm.tir import Expr, T


def value(block: View) -> Expr:
    """One column."""
    word = tir.cast(block.load("w", 0, 1), "int32", block.lanes)
    word = T.shift_left(word, tir.const(16, "int32", block.lanes))
    return tir.let(tir.bits(word, "float32", block.lanes))
