"""Q5_1: 32 weights of 5 bits above a minimum, one scale.

byte 0     2     4      8            24
     | d   | m   | qh 4 | qs 16      |
d, m f16 scale and minimum
qh   bit i: the fifth bit of weight i
qs   byte j: low nibble weight j, high nibble weight j + 16
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 32, 24


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * q + m."""
    low = b.u8(8 + i % 16) >> i // 16 * 4 & 15
    high = b.u8(4 + i // 8) >> i % 8 & 1
    return b.f16(0) * (low | high << 4) + b.f16(2)
