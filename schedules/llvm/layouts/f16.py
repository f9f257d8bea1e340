"""How the CPU decodes F16, see schedules/packed/f16.py."""

from __future__ import annotations

from xpuc.schedules.llvm.blocks import View
from xpuc.schedules.llvm.tir import Expr


def value(block: View) -> Expr:
    """One column."""
    return block.f32("w")
