"""Q3_K: 256 weights of 3 bits around zero in 16 groups of 16, each with a 6-bit scale.

byte 0           32           96           108   110
     | hmask 32  | qs 64      | scales 12  | d   |
hmask   byte l, bit j: the third bit of weight 32 j + l
qs      byte 32 h + l: two bits each of weights 128 h + l, + 32, + 64, + 96, lowest first;
        three bits q stand for q - 4
scales  low four bits of group g: byte g % 8, high nibble from group 8 on;
        upper two: byte 8 + g % 4, bits 2 (g // 4) and the next; six bits s stand for s - 32
d       f16 scale of the scales
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 256, 110


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * (scale - 32) * (q - 4)."""
    g = i // 16
    scale = b.u8(96 + g % 8) >> g // 8 * 4 & 15 | (b.u8(104 + g % 4) >> g // 4 * 2 & 3) << 4
    low = b.u8(32 + i // 128 * 32 + i % 32) >> i % 128 // 32 * 2 & 3
    high = b.u8(i % 32) >> i // 32 & 1
    return b.f16(108) * (scale - 32) * ((low | high << 2) - 4)
