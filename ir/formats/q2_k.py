"""Q2_K: 256 weights of 2 bits in 16 groups of 16, each with a 4-bit scale and minimum.

byte 0            16           80    82     84
     | scales 16  | qs 64      | d   | dmin |
scales  byte g: low nibble the scale, high nibble the minimum of weights 16 g to 16 g + 15
qs      byte 32 h + l: two bits each of weights 128 h + l, + 32, + 64, + 96, lowest first
d, dmin f16 scale of the scales, of the minima
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 256, 84


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * scale * q - dmin * minimum."""
    group = b.u8(i // 16)
    q = b.u8(16 + i // 128 * 32 + i % 32) >> i % 128 // 32 * 2 & 3
    return b.f16(80) * (group & 15) * q - b.f16(82) * (group >> 4)
