"""BF16: the upper half of an IEEE single.

byte 0        2
     | weight |
"""

from __future__ import annotations

from xpuc.ir.formats.access import Block, Value

n, nbytes = 1, 2


def decode(b: Block, i: Value) -> Value:
    """Weight `i` of block `b`."""
    return b.bf16(2 * i)
