"""What every target's layout of a weight format starts from: one file a format, named like it.

A file says how a block's bytes become fields (`fields`, numpy), how many elements of which planes
those are, and what the elements mean. A target arranges the fields in memory as its kernels read
them, and decodes them in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from xpuc.errors import UnsupportedError, nearest
from xpuc.schedules.packed.bits import COLUMNS, Bytes, Fields

__all__ = ["ALIGNMENT", "COLUMNS", "FORMATS", "Bytes", "Field", "Fields", "Packed", "Plane",
           "packed", "padded_size"]  # fmt: skip

ALIGNMENT = 64  # bytes a plane is a multiple of
FORMATS = tuple(sorted(p.stem.upper() for p in Path(__file__).parent.glob("[!_]*.py")
                       if p.stem != "bits"))  # fmt: skip


@dataclass(frozen=True)
class Field:
    """What a block stores of one row in one plane: `per_block` elements."""

    name: str
    dtype: str
    per_block: int


@dataclass(frozen=True)
class Plane:
    """An array of a packed weight: `size` elements, padding included."""

    name: str
    dtype: str
    size: int


@dataclass(frozen=True)
class Packed:
    """A weight format. Blocks of `columns` columns take `nbytes` bytes in a GGUF file.

    The weights of a quantised one are `d * scale * (q - offset) + m * min`, q from `qs`, the rest
    from the planes of these names (`scales`, `mins`) where it has them: a number for every 32
    columns if a block has one for each of its sub-blocks, for 16 if two.
    """

    name: str
    columns: int
    nbytes: int
    planes: tuple[Field, ...]
    fields: Callable[[Bytes], Fields]
    offset: int = 0  # taken off every element
    values: tuple[int, ...] | None = None  # what the elements are indices of

    @property
    def bits(self) -> int:
        """Of an element; those of 8 bits are signed. 0 for floats, which have no `qs`."""
        qs = next((f for f in self.planes if f.name == "qs"), None)
        return 0 if qs is None else 8 * qs.per_block // self.columns

    @property
    def is_quantised(self) -> bool:
        """Whether it comes in blocks, so that int8 activations fit it."""
        return self.columns > 1


def packed(format: str) -> Packed:
    """The facts of a format; UnsupportedError if there is none of this name."""
    if format not in FORMATS:
        raise UnsupportedError(
            f"no kernels know the weight format {format}", nearest(format, FORMATS)
        )
    module = import_module(f"{__name__}.{format.lower()}")
    return Packed(
        format, module.COLUMNS, module.BYTES, module.PLANES, module.fields,
        offset=getattr(module, "OFFSET", 0), values=getattr(module, "VALUES", None),
    )  # fmt: skip


def padded_size(elements: int, dtype: str) -> int:
    """`elements` rounded up to whole multiples of ALIGNMENT bytes."""
    step = ALIGNMENT // np.dtype(dtype).itemsize
    return -(-elements // step) * step
