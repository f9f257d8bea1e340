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
from xpuc.ir.formats import dequantize, format_of
from xpuc.schedules import target_of

_DRAWN = 1 << 18  # weights at a time
_KEPT = 1 << 6  # blocks, at least
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
    target, blocks = target_of(kind), _blocks(format, _LARGEST / math.sqrt(columns))
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


def _blocks(format: str, largest: float) -> np.ndarray:
    """Random bytes that are blocks of weights of up to `largest`: uint8 (blocks, block bytes)."""
    facts, rng = format_of(format), np.random.default_rng(0)
    found: list[np.ndarray] = []
    while sum(map(len, found)) < _KEPT:
        shape = (_DRAWN // facts.n, facts.nbytes)
        drawn = rng.integers(0, 256, shape, dtype=np.uint8)
        most = np.abs(dequantize(facts, drawn)).max(axis=1)  # NaN where one weight is
        found.append(drawn[(most >= _SMALLEST * largest) & (most <= largest)])
    return np.concatenate(found)
