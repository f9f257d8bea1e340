"""A block read by TIR expressions: `decode` gives the expression of one weight, in TE or TIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from xpuc.ir.formats.access import Value


class ExpressionBlock:
    """One block; `byte(offset)` is the uint8 expression of its byte there. Integers are int32.

    Wider fields are put together from bytes: blocks need not be aligned, and LLVM merges the loads.
    """

    def __init__(self, byte: Callable[[Value], Value]) -> None:
        self.byte = byte

    def u8(self, offset: Value) -> Value:
        return tirx.Cast("int32", self.byte(offset))

    def i8(self, offset: Value) -> Value:
        return tirx.Cast("int32", tirx.reinterpret("int8", self.byte(offset)))

    def u16(self, offset: Value) -> Value:
        return self.u8(offset) | self.u8(offset + 1) << 8

    def f16(self, offset: Value) -> Value:
        bits = tirx.Cast("uint16", self.u16(offset))
        return tirx.Cast("float32", tirx.reinterpret("float16", bits))

    def bf16(self, offset: Value) -> Value:
        return tirx.reinterpret("float32", self.u16(offset) << 16)

    def f32(self, offset: Value) -> Value:
        return tirx.reinterpret("float32", self.u16(offset) | self.u16(offset + 2) << 16)

    def where(self, condition: Value, yes: Value, no: Value) -> Value:
        return tirx.Select(condition, yes, no)

    def table(self, values: Sequence[int], index: Value) -> Value:
        # A tree of selects: no target lacks them, and no constant buffer has to be carried along.
        if len(values) == 1:
            return tirx.const(values[0], "int32")
        half = len(values) // 2
        low, high = self.table(values[:half], index), self.table(values[half:], index - half)
        return tirx.Select(index < half, low, high)
