"""Weights nobody trained: for each plane the range a load draws its elements from.

A sample of random valid blocks is packed as the target packs weights, and what its planes hold
gives the ranges: so no layout has to be known here. Blocks are taken whose weights are small
enough for sums over a row to stay a few units.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from xpuc.artifact import Plane, Range
from xpuc.ir.formats import format_of, random_blocks
from xpuc.schedules import target_of

_BLOCKS = 1 << 6  # at least
_LARGEST = 4.0  # a block's largest weight times the root of the columns, at most
_SMALLEST = 2.0**-6  # and at least, of that
_CODES = ("qs", "top")  # fields whose every bit pattern is a weight


def matrix_ranges(kind: str, format: str, columns: int) -> tuple[Range | None, ...]:
    """Of the planes of a matrix, in order; None: any bits."""
    return _ranges(kind, format, 1 << columns.bit_length())


def vector_range(name: str) -> tuple[Range]:
    """Of a norm's factors, which are about 1, or a bias."""
    return ((-0.1, 0.1) if name.endswith(".bias") else (0.9, 1.1),)


@cache
def _ranges(kind: str, format: str, columns: int) -> tuple[Range | None, ...]:
    target, largest = target_of(kind), _LARGEST / math.sqrt(columns)
    blocks = random_blocks(format_of(format), _SMALLEST * largest, largest, _BLOCKS)
    rows = 1 << 5  # layouts that interleave rows have whole groups of so many
    blocks = blocks[: len(blocks) // rows * rows]
    facts = target.planes(format, rows, len(blocks) // rows * format_of(format).n)
    arrays = target.pack(format, blocks.reshape(rows, -1))
    return tuple(
        None if plane.name in _CODES else _range(plane, array)
        for plane, array in zip(facts, arrays, strict=True)
    )


def _range(plane: Plane, array: np.ndarray) -> Range:
    if plane.name == "w" and array.dtype.kind == "u":
        array = array[array < 1 << 8 * array.itemsize - 1]  # bits of positive floats are in order
    return float(array.min()), float(array.max())
