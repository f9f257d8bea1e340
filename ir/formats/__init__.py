"""Weight formats: one file each, named like the format; `decode(b, i)` there is its whole meaning.

A row of k weights is k / n blocks of nbytes bytes, one after the other, as in a GGUF file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import UnsupportedError, nearest
from xpuc.ir.formats.access import Block, Value
from xpuc.ir.formats.access.arrays import ArrayBlock

_WEIGHTS_AT_ONCE = 1 << 20  # of `dequantize`, so that its temporaries stay small
_DRAWN_AT_ONCE = 1 << 18  # weights


@dataclass(frozen=True)
class Format:
    """A weight format: blocks of `nbytes` bytes hold `n` weights each."""

    name: str
    n: int
    nbytes: int
    decode: Callable[[Block, Value], Value]


def formats() -> dict[str, Format]:
    """Every format by its GGUF name."""
    return {name: _load(name) for name in _names()}


def format_of(name: str) -> Format:
    """The format of that GGUF name; UnsupportedError if there is none."""
    names = _names()
    if name not in names:
        raise UnsupportedError(f"xpuc cannot decode weights of format {name}", nearest(name, names))
    return _load(name)


def row_bytes(format: Format, k: int) -> int:
    """Bytes of a row of `k` weights; UnsupportedError if they do not fill whole blocks."""
    if k % format.n:
        raise UnsupportedError(
            f"a row of {k} weights is not a whole number of {format.name} blocks",
            f"{format.name} rows hold a multiple of {format.n} weights",
        )
    return k // format.n * format.nbytes


def dequantize(format: Format, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights of packed rows: uint8 (rows, row_bytes) to float32 (rows, k)."""
    rows, width = raw.shape
    assert width % format.nbytes == 0, f"{width} bytes are not whole {format.name} blocks"
    k = width // format.nbytes * format.n
    weights = np.empty((rows, k), np.float32)
    step = max(1, _WEIGHTS_AT_ONCE // max(1, k))
    for start in range(0, rows, step):
        blocks = ArrayBlock(raw[start : start + step].reshape(-1, format.nbytes))
        with np.errstate(invalid="ignore"):  # an infinite scale times zero is NaN, as in ggml
            part = format.decode(blocks, np.arange(format.n, dtype=np.int16))
        assert part.dtype == np.float32, f"{format.name} is decoded as {part.dtype}"
        weights[start : start + step] = part.reshape(-1, k)
    return weights


def random_blocks(format: Format, smallest: float, largest: float, count: int) -> NDArray[np.uint8]:
    """`count` blocks or more of random bytes, the same ones each time: uint8 (blocks, nbytes).

    The largest weight of a block is of `smallest` to `largest`.
    """
    rng = np.random.default_rng(0)
    found = np.empty((0, format.nbytes), np.uint8)
    while len(found) < count:
        shape = (_DRAWN_AT_ONCE // format.n, format.nbytes)
        drawn = rng.integers(0, 256, shape, dtype=np.uint8)
        most = np.abs(dequantize(format, drawn)).max(axis=1)  # NaN where one weight is
        found = np.concatenate([found, drawn[(most >= smallest) & (most <= largest)]])
    return found


@cache
def _names() -> tuple[str, ...]:
    files = Path(__file__).parent.glob("*.py")
    return tuple(sorted(file.stem.upper() for file in files if file.stem != "__init__"))


@cache
def _load(name: str) -> Format:
    module = import_module(f"{__name__}.{name.lower()}")
    return Format(name, module.n, module.nbytes, module.decode)
