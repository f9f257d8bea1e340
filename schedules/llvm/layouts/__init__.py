"""How the CPU kernels decode each weight format: one file a format, named like it.

A file says what a block's sub-blocks are as vectors (`sub_block`, or `value` for formats without
blocks): mat-vec, many rows, exact f32 and embedding all read that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from xpuc.schedules.llvm.blocks import SubBlock, View
from xpuc.schedules.llvm.packing import ROWS, interleave, row_chunks
from xpuc.schedules.llvm.tir import Expr
from xpuc.schedules.packed import COLUMNS, Bytes, Packed, Plane, packed, padded_size


@dataclass(frozen=True)
class Layout(Packed):
    """A format in memory, and how it is decoded."""

    _: KW_ONLY
    sub_block: Callable[[View, Expr], SubBlock] | None  # of quantised formats: by its number
    value: Callable[[View], Expr] | None  # of the others: the block's one column

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a block of a quantised format."""
        return self.columns // COLUMNS


def layout_of(format: str) -> Layout:
    """The layout of a format; UnsupportedError if there is none."""
    facts = packed(format)
    module = import_module(f"{__name__}.{format.lower()}")
    return Layout(
        **vars(facts),
        sub_block=getattr(module, "sub_block", None), value=getattr(module, "value", None),
    )  # fmt: skip


def planes(format: str, rows: int, k: int) -> tuple[Plane, ...]:
    """The arrays a weight of `rows` rows and `k` columns is packed into."""
    facts = packed(format)
    assert k % facts.columns == 0, f"{k} columns are not whole blocks of {format}"
    blocks = -(-rows // ROWS) * ROWS * (k // facts.columns)
    return tuple(
        Plane(f.name, f.dtype, padded_size(blocks * f.per_block, f.dtype)) for f in facts.planes
    )


def pack(format: str, raw: Bytes) -> dict[str, NDArray[np.generic]]:
    """Raw rows uint8 (rows, row_bytes), as in a GGUF file, to the arrays of `planes`, by name."""
    facts = packed(format)
    rows, row_bytes = raw.shape
    blocks = row_bytes // facts.nbytes
    out = {p.name: np.zeros(p.size, p.dtype) for p in planes(format, rows, blocks * facts.columns)}
    for group, chunk in row_chunks(raw):
        fields = facts.fields(chunk.reshape(len(chunk), blocks, facts.nbytes))
        for f in facts.planes:
            start = group * ROWS * blocks * f.per_block
            stop = start + len(chunk) * blocks * f.per_block
            interleave(fields[f.name].astype(f.dtype, copy=False), out[f.name][start:stop])
    return out
