"""Q4_0: 32 weights of 4 bits around zero, one scale.

byte 0     2            18
     | d   | qs 16      |
d    f16 scale
qs   byte j: low nibble weight j, high nibble weight j + 16; a nibble q stands for q - 8
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 32, 18


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * (q - 8)."""
    return b.f16(0) * ((b.u8(2 + i % 16) >> i // 16 * 4 & 15) - 8)
