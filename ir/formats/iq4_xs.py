"""IQ4_XS: 256 weights of 4 bits in 8 groups of 32, each with a 6-bit scale; levels of IQ4_NL.

byte 0     2           4           8             136
     | d   | scales_h  | scales_l  | qs 128      |
d         f16 scale of the scales
scales_h  upper two bits of the scale of group g: byte g // 4, bits 2 (g % 4) and the next
scales_l  low four bits: byte g // 2, low nibble for even g; six bits s stand for s - 32
qs        byte 16 g + l: low nibble weight 32 g + l, high nibble weight 32 g + 16 + l
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value
from xpuc.ir.formats.iq4_nl import LEVELS

n, nbytes = 256, 136


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * (scale - 32) * LEVELS[q]."""
    g = i // 32
    scale = b.u8(4 + g // 2) >> g % 2 * 4 & 15 | (b.u8(2 + g // 4) >> g % 4 * 2 & 3) << 4
    q = b.u8(8 + g * 16 + i % 16) >> i % 32 // 16 * 4 & 15
    return b.f16(0) * (scale - 32) * b.table(LEVELS, q)
