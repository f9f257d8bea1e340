"""Q5_K: 256 weights of 5 bits in 8 groups of 32, each with a 6-bit scale and minimum.

byte 0     2      4           16       48            176
     | d   | dmin | scales 12 | qh 32  | qs 128      |
d, dmin f16 scale of the scales, of the minima
scales  as in Q4_K
qh      byte l, bit g: the fifth bit of weight 32 g + l
qs      byte 32 h + l: low nibble weight 64 h + l, high nibble weight 64 h + 32 + l
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value
from xpuc.ir.formats.q4_k import scale_and_minimum

n, nbytes = 256, 176


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * scale * q - dmin * minimum."""
    scale, minimum = scale_and_minimum(b, i // 32)
    low = b.u8(48 + i // 64 * 32 + i % 32) >> i // 32 % 2 * 4 & 15
    high = b.u8(16 + i % 32) >> i // 32 & 1
    return b.f16(0) * scale * (low | high << 4) - b.f16(2) * minimum
