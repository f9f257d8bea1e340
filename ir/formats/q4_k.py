"""Q4_K: 256 weights of 4 bits in 8 groups of 32, each with a 6-bit scale and minimum.

byte 0     2      4           16            144
     | d   | dmin | scales 12 | qs 128      |
d, dmin f16 scale of the scales, of the minima
scales  see `scale_and_minimum`
qs      byte 32 h + l: low nibble weight 64 h + l, high nibble weight 64 h + 32 + l
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 256, 144


def scale_and_minimum(b: Block, g: Value) -> tuple[Value, Value]:
    """The 6-bit scale and minimum of group `g`, of twelve bytes at byte 4.

    byte g      (g = 0..3)   s' s' s s s s s s     s: scale of group g,     s': of group g + 4
    byte 4 + g               m' m' m m m m m m     m: minimum of group g,   m': of group g + 4
    byte 8 + g               m' m' m' m' s' s' s' s'      the low four bits of s' and m'
    """
    s, m, low = b.u8(4 + g % 4), b.u8(8 + g % 4), b.u8(12 + g % 4)
    return (
        b.where(g < 4, s & 63, low & 15 | s >> 6 << 4),
        b.where(g < 4, m & 63, low >> 4 | m >> 6 << 4),
    )


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * scale * q - dmin * minimum."""
    scale, minimum = scale_and_minimum(b, i // 32)
    q = b.u8(16 + i // 64 * 32 + i % 32) >> i // 32 % 2 * 4 & 15
    return b.f16(0) * scale * q - b.f16(2) * minimum
