"""How `decode` reads a block: one set of words, spoken by numpy arrays and by TIR expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Value = Any  # a numpy array, a TIR expression or an int


class Block(Protocol):
    """One quant block. Offsets are in bytes from its first; every field is little endian.

    Integers come back wide enough to shift and combine: signed, at least 16 bits.
    """

    def u8(self, offset: Value) -> Value: ...

    def i8(self, offset: Value) -> Value: ...

    def u16(self, offset: Value) -> Value: ...

    def f16(self, offset: Value) -> Value:
        """A half, as float32."""

    def bf16(self, offset: Value) -> Value:
        """The upper half of a single, as float32."""

    def f32(self, offset: Value) -> Value: ...

    def where(self, condition: Value, yes: Value, no: Value) -> Value:
        """One of two integers; both are evaluated, so both must stay inside the block."""

    def table(self, values: Sequence[int], index: Value) -> Value:
        """`values[index]` of a short table of bytes, signed."""
