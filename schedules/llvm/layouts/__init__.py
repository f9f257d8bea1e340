"""How each weight format is laid out for the CPU kernels: one file a format, named like it.

A file says how a block's bytes become fields of planes (`fields`, numpy) and what its sub-blocks
are as vectors (`sub_block`, or `value` for formats without blocks): mat-vec, many rows, exact f32
and embedding all read that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import UnsupportedError, nearest
from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.packing import (
    COLUMNS,
    ROWS,
    Bytes,
    Field,
    Fields,
    Plane,
    interleave,
    padded_size,
    row_chunks,
)
from xpuc.schedules.llvm.tir import Expr

FORMATS = tuple(sorted(p.stem.upper() for p in Path(__file__).parent.glob("[!_]*.py")))


@dataclass(frozen=True)
class Layout:
    """A format in memory. Blocks of `columns` columns take `nbytes` bytes in a GGUF file."""

    name: str
    columns: int
    nbytes: int
    planes: tuple[Field, ...]
    fields: Callable[[Bytes], Fields]
    sub_block: Callable[[View, Expr], SubBlock] | None  # of quantised formats: by its number
    value: Callable[[View], Expr] | None  # of the others: the block's one column

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a block of a quantised format."""
        return self.columns // COLUMNS

    @property
    def is_quantised(self) -> bool:
        """Whether int8 activations fit it."""
        return self.sub_block is not None


def layout_of(format: str) -> Layout:
    """The layout of a format; UnsupportedError if there is none."""
    if format not in FORMATS:
        raise UnsupportedError(
            f"the CPU kernels do not know the weight format {format}", nearest(format, FORMATS)
        )
    module = import_module(f"{__name__}.{format.lower()}")
    return Layout(
        format,
        module.COLUMNS,
        module.BYTES,
        module.PLANES,
        module.fields,
        getattr(module, "sub_block", None),
        getattr(module, "value", None),
    )


def planes(format: str, rows: int, k: int) -> tuple[Plane, ...]:
    """The arrays a weight of `rows` rows and `k` columns is packed into."""
    layout = layout_of(format)
    assert k % layout.columns == 0, f"{k} columns are not whole blocks of {format}"
    blocks = -(-rows // ROWS) * ROWS * (k // layout.columns)
    return tuple(
        Plane(f.name, f.dtype, padded_size(blocks * f.per_block, f.dtype)) for f in layout.planes
    )


def pack(format: str, raw: Bytes) -> dict[str, NDArray[np.generic]]:
    """Raw rows uint8 (rows, row_bytes), as in a GGUF file, to the arrays of `planes`, by name."""
    layout = layout_of(format)
    rows, row_bytes = raw.shape
    blocks = row_bytes // layout.nbytes
    out = {p.name: np.zeros(p.size, p.dtype) for p in planes(format, rows, blocks * layout.columns)}
    for group, chunk in row_chunks(raw):
        fields = layout.fields(chunk.reshape(len(chunk), blocks, layout.nbytes))
        for f in layout.planes:
            start = group * ROWS * blocks * f.per_block
            stop = start + len(chunk) * blocks * f.per_block
            interleave(fields[f.name].astype(f.dtype, copy=False), out[f.name][start:stop])
    return out
