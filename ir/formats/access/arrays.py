"""Blocks held in a numpy array: `decode` gives a column of weights for every block at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xpuc.ir.formats.access import Value


class ArrayBlock:
    """All blocks of `raw`, uint8 (blocks, nbytes). Fields are (blocks, 1) or (blocks, len(offset)).

    Integers are int16, which numpy multiplies with float32 as float32: with int32 the product would
    be float64 and a sum would not be rounded as the format says. Only u16 is int32.
    """

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self.raw = raw

    def u8(self, offset: Value) -> Value:
        return self.raw[:, np.atleast_1d(offset)].astype(np.int16)

    def i8(self, offset: Value) -> Value:
        return self.raw[:, np.atleast_1d(offset)].view(np.int8).astype(np.int16)

    def u16(self, offset: Value) -> Value:
        low, high = (self.raw[:, np.atleast_1d(offset + j)].astype(np.int32) for j in range(2))
        return low | high << 8

    def f16(self, offset: Value) -> Value:
        return self.u16(offset).astype(np.uint16).view(np.float16).astype(np.float32)

    def bf16(self, offset: Value) -> Value:
        return (self.u16(offset) << 16).view(np.float32)

    def f32(self, offset: Value) -> Value:
        return (self.u16(offset) | self.u16(offset + 2) << 16).view(np.float32)

    def where(self, condition: Value, yes: Value, no: Value) -> Value:
        return np.where(condition, yes, no)

    def table(self, values: Sequence[int], index: Value) -> Value:
        return np.array(values, np.int16)[index]
