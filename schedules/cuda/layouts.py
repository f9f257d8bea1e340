"""Packed weights on a GPU: row after row, each field of a block in a plane of its own.

A lane reads a sub-block (32 columns of a row), its neighbour the next one, so planes hold a row's
blocks side by side: `[rows][blocks][per block]`. The units of `qs` stand in planes of powers of two
(`qs`, and `top` for the fifth and sixth bits of an element, the third of three), so that a lane
loads 16, 8 or 4 aligned bytes and a warp whole lines.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from xpuc.schedules.packed import COLUMNS, Bytes, Packed, Plane, packed, padded_size

# Units of 4 bytes of a sub-block in `qs` and `top`, by the bits of an element.
UNITS: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
_CHUNK_BYTES = 1 << 22  # packed at a time, so that temporaries stay in the cache


def planes(format: str, rows: int, k: int) -> tuple[Plane, ...]:
    """The arrays a weight of `rows` rows and `k` columns is packed into."""
    facts = packed(format)
    assert k % facts.columns == 0, f"{k} columns are not whole blocks of {format}"
    blocks = rows * (k // facts.columns)
    return tuple(
        Plane(name, dtype, padded_size(blocks * per_block, dtype))
        for name, dtype, per_block in elements(facts)
    )


def elements(facts: Packed) -> Iterator[tuple[str, str, int]]:
    """(name, dtype, elements a block) of each plane; `qs` and `top` in words of a unit."""
    for field in facts.planes:
        if field.name == "qs":
            for name, units in zip(("qs", "top"), UNITS[facts.bits], strict=False):
                yield name, "uint32", units * (facts.columns // COLUMNS)
        else:
            yield field.name, field.dtype, field.per_block


def pack(format: str, raw: Bytes) -> dict[str, NDArray[np.generic]]:
    """Raw rows uint8 (rows, row_bytes), as in a GGUF file, to the arrays of `planes`, by name."""
    facts = packed(format)
    rows, row_bytes = raw.shape
    blocks = row_bytes // facts.nbytes
    out = {p.name: np.zeros(p.size, p.dtype) for p in planes(format, rows, blocks * facts.columns)}
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        chunk = raw[start : start + step]
        arrays = _split(facts, chunk.reshape(len(chunk), blocks, facts.nbytes))
        for name, _, per_block in elements(facts):
            first = start * blocks * per_block
            flat = np.ascontiguousarray(arrays[name]).view(out[name].dtype).reshape(-1)
            out[name][first : first + flat.size] = flat
    return out


def _split(facts: Packed, blocks: Bytes) -> dict[str, NDArray[np.generic]]:
    """The fields of blocks (rows, blocks, bytes), the units of `qs` in their planes."""
    arrays: dict[str, NDArray[np.generic]] = dict(facts.fields(blocks))
    if facts.bits:
        units = arrays.pop("qs")
        rows, n_blocks = units.shape[:2]
        sub_blocks = np.ascontiguousarray(units).reshape(
            rows, n_blocks * facts.columns // COLUMNS, facts.bits, COLUMNS // 8
        )
        low, *top = UNITS[facts.bits]
        arrays["qs"] = sub_blocks[:, :, :low]
        if facts.values is not None:
            arrays["qs"] = _in_order(arrays["qs"])
        if top:
            arrays["top"] = sub_blocks[:, :, low:]
    return arrays


def _in_order(units: NDArray[np.generic]) -> Bytes:
    """The low nibbles of 4 bytes (..., 4) side by side, then the high ones: indices of a table are
    looked up four at a time."""
    raw = units.view(np.uint8)
    low, high = raw & 15, raw >> 4
    pairs = [part[..., i] | part[..., i + 1] << 4 for part in (low, high) for i in (0, 2)]
    return np.stack(pairs, axis=-1)
