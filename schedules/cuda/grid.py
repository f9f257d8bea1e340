"""How a kernel is launched, read off its function and its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from xpuc.schedules import Launch


@dataclass(frozen=True)
class Grid:
    """Blocks of `warps` warps each; `shared_bytes` are asked for at the launch of a block."""

    blocks: int
    warps: int
    shared_bytes: int = 0


def grid_of(launch: Launch, symbols: Mapping[str, int]) -> Grid:
    """That of a kernel of `tir.launch`; `symbols` are the values of those of its arguments."""
    scopes = list(_scopes(launch.kernel.body))
    _, warps, *_ = (s for s in scopes if hasattr(s, "def"))
    asked = [s for s in scopes if getattr(s, "attr_key", None) == "tirx.dyn_smem_bytes"]
    return Grid(
        math.prod(axes(launch.kernel, _sizes(launch, symbols))),
        int(getattr(warps, "def").extents[0]),
        sum(int(each.value) for each in asked),
    )


def axes(kernel: tirx.PrimFunc, sizes: Mapping[Any, int]) -> tuple[int, ...]:
    """Blocks of a kernel of `tir.launch` along each axis; `sizes` are the values of its symbols."""
    blocks = next(s for s in _scopes(kernel.body) if hasattr(s, "def"))
    return tuple(_value(extent, sizes) for extent in getattr(blocks, "def").extents)


def argument_bytes(launch: Launch, symbols: Mapping[str, int]) -> int:
    """Of the tensors that a launch reads and writes, each counted once."""
    return sum(
        math.prod(_size(d, symbols) for d in var.ty.shape) * np.dtype(str(var.ty.dtype)).itemsize
        for var in (*launch.inputs, *launch.outputs)
    )


def _sizes(launch: Launch, symbols: Mapping[str, int]) -> dict[Any, int]:
    """The dimensions of a kernel's parameters that are known only at its launch."""
    found = {}
    for param, var in zip(launch.kernel.params, (*launch.inputs, *launch.outputs), strict=True):
        shape = param.ty.shape
        for inside, outside in zip(shape, var.ty.shape, strict=True):
            if isinstance(inside, tirx.Var):
                found[inside] = _size(outside, symbols)
    return found


def _size(dimension: Any, symbols: Mapping[str, int]) -> int:
    return symbols[dimension.name] if isinstance(dimension, tirx.Var) else int(dimension)


def _scopes(statement: Any) -> Iterator[Any]:
    """The statements before a thread's own, in order: blocks, warps, lanes, threads, attributes."""
    if hasattr(statement, "seq"):
        for each in statement.seq:
            yield from _scopes(each)
    elif hasattr(statement, "def"):
        yield statement
    elif isinstance(statement, tirx.AttrStmt):
        yield statement
        yield from _scopes(statement.body)


def _value(extent: Any, sizes: Mapping[Any, int]) -> int:
    """An extent of the grid."""
    if isinstance(extent, tirx.Var):
        return sizes[extent]
    if isinstance(extent, int | tirx.IntImm):
        return int(extent)
    a, b = _value(extent.a, sizes), _value(extent.b, sizes)
    return {
        "Add": a + b, "Sub": a - b, "Mul": a * b, "FloorDiv": a // max(1, b), "Max": max(a, b),
        "Min": min(a, b),
    }[type(extent).__name__]  # fmt: skip
