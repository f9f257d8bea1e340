"""F16: plain IEEE half precision.

byte 0        2
     | weight |
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 1, 2


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`."""
    return b.f16(2 * i)
