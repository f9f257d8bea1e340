"""Q6_K: 256 weights of 6 bits around zero in 16 groups of 16, each with an 8-bit scale.

byte 0            128        192          208   210
     | ql 128     | qh 64    | scales 16  | d   |
ql      byte 64 h + l: low nibble weight 128 h + l, high nibble weight 128 h + 64 + l
qh      byte 32 h + l: upper two bits of weights 128 h + l, + 32, + 64, + 96, lowest first;
        six bits q stand for q - 32
scales  signed byte g: scale of weights 16 g to 16 g + 15
d       f16 scale of the scales
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 256, 210


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * scale * (q - 32)."""
    low = b.u8(i // 128 * 64 + i % 64) >> i % 128 // 64 * 4 & 15
    high = b.u8(128 + i // 128 * 32 + i % 32) >> i % 128 // 32 * 2 & 3
    return b.f16(208) * b.i8(192 + i // 16) * ((low | high << 4) - 32)
