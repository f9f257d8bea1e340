"""Q5_0: 32 weights of 5 bits around zero, one scale.

byte 0     2      6            22
     | d   | qh 4 | qs 16      |
d    f16 scale
qh   bit i: the fifth bit of weight i
qs   byte j: low nibble weight j, high nibble weight j + 16; five bits q stand for q - 16
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 32, 22


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * (q - 16)."""
    low = b.u8(6 + i % 16) >> i // 16 * 4 & 15
    high = b.u8(2 + i // 8) >> i % 8 & 1
    return b.f16(0) * ((low | high << 4) - 16)
