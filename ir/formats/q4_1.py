"""Q4_1: 32 weights of 4 bits above a minimum, one scale.

byte 0     2     4            20
     | d   | m   | qs 16      |
d, m f16 scale and minimum
qs   byte j: low nibble weight j, high nibble weight j + 16
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 32, 20


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * q + m."""
    return b.f16(0) * (b.u8(4 + i % 16) >> i // 16 * 4 & 15) + b.f16(2)
