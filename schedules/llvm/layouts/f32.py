"""How the CPU decodes F32, see schedules/packed/f32.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import View
from xpuc.schedules.llvm.tir import Expr


def value(block: View) -> Expr:
    """One column."""
    return block.load("w", 0, 1)
