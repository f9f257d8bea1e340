"""F32: plain IEEE single precision.

byte 0        4
     | weight |
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 1, 4


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`."""
    return b.f32(4 * i)
