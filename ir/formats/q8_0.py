"""Q8_0: 32 signed bytes, one scale.

byte 0     2            34
     | d   | qs 32      |
d    f16 scale
qs   byte i: weight i, signed
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 32, 34


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * q."""
    return b.f16(0) * b.i8(2 + i)
