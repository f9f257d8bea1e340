"""IQ4_NL: 32 weights of 4 bits, each naming one of 16 unevenly spaced levels, one scale.

byte 0     2            18
     | d   | qs 16      |
d    f16 scale
qs   byte j: low nibble weight j, high nibble weight j + 16; a nibble q stands for LEVELS[q]
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 32, 18

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`: d * LEVELS[q]."""
    return b.f16(0) * b.table(LEVELS, b.u8(2 + i % 16) >> i // 16 * 4 & 15)
