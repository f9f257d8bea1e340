"""Weights that an artifact does not carry: its planes, made up from a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from xpuc.artifact import Plane, Range, Synthetic
from xpuc.runtime.kv_pool import pages

_CHUNK = 1 << 21  # 64-bit words drawn at a time: 16 MiB


def made_up_planes(planes: tuple[Plane, ...], synthetic: Synthetic) -> Iterator[np.ndarray]:
    """Every plane as a one-dimensional array of pages of its own, in operand order.

    The same for a seed on every machine; a plane does not depend on the others.
    """
    for number, (plane, span) in enumerate(zip(planes, synthetic.ranges, strict=True)):
        array = pages((plane.size,), plane.dtype)
        _fill(array, span, np.random.PCG64([synthetic.seed, number]))
        yield array


def _fill(array: np.ndarray, span: Range | None, bits: np.random.PCG64) -> None:
    if span is None:
        for part in _parts(array.view(np.uint8), 8):
            part[:] = _drawn(bits, len(part), np.uint8)
    elif array.dtype.kind == "f":
        low, high = span
        for part in _parts(array, 2):
            part[:] = low + (high - low) * (_drawn(bits, len(part), np.uint32) * 2.0**-32)
    elif array.itemsize == 1:
        _whole_numbers(array, span, bits, np.uint8, np.uint16)
    else:
        _whole_numbers(array, span, bits, np.uint32, np.uint64)


def _whole_numbers(
    array: np.ndarray, span: Range, bits: np.random.PCG64, drawn: type, product: type
) -> None:
    """Of a range: the upper half of a product of drawn bits and how many numbers there are."""
    low, count = int(span[0]), int(span[1]) - int(span[0]) + 1
    width = 8 * np.dtype(drawn).itemsize
    for part in _parts(array, 64 // width):
        numbers: np.ndarray = _drawn(bits, len(part), drawn).astype(product)
        numbers *= product(count)
        numbers >>= product(width)
        part[:] = (numbers + product(low % (1 << width))).astype(drawn).astype(array.dtype)


def _parts(array: np.ndarray, per_word: int) -> Iterator[np.ndarray]:
    """The array in turns, of `_CHUNK` words each that have so many elements."""
    step = _CHUNK * per_word
    return (array[start : start + step] for start in range(0, len(array), step))


def _drawn(bits: np.random.PCG64, n: int, dtype: type) -> np.ndarray:
    """`n` random numbers of all bits of an unsigned type."""
    words = -(-n * np.dtype(dtype).itemsize // 8)
    return np.asarray(bits.random_raw(words)).view(dtype)[:n]
