"""How a kernel is launched, read off its function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tvm import tirx


def launch_shape(kernel: tirx.PrimFunc, n: int) -> tuple[int, int]:
    """(blocks, warps of a block) of a kernel of `tir.launch`; `n` is any number of rows it has."""
    grid, warps, *_ = (getattr(each, "def").extents for each in _scopes(kernel.body))
    return math.prod(_value(extent, n) for extent in grid), int(warps[0])


def _scopes(statement: Any) -> Iterator[Any]:
    """The statements that name blocks, warps, lanes and threads, in order."""
    if hasattr(statement, "seq"):
        for each in statement.seq:
            yield from _scopes(each)
    elif hasattr(statement, "def"):
        yield statement
    elif isinstance(statement, tirx.AttrStmt):
        yield from _scopes(statement.body)


def _value(extent: Any, n: int) -> int:
    """An extent with every symbol `n`."""
    if isinstance(extent, tirx.Var):
        return n
    if isinstance(extent, int | tirx.IntImm):
        return int(extent)
    a, b = _value(extent.a, n), _value(extent.b, n)
    return {
        "Add": a + b, "Sub": a - b, "Mul": a * b, "FloorDiv": a // max(1, b), "Max": max(a, b),
        "Min": min(a, b),
    }[type(extent).__name__]  # fmt: skip
