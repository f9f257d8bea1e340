"""Packed weights on a CPU: 8 rows interleaved, each field of a block in a plane of its own.

A plane is an array that holds, for every group of 8 rows and every block, the field's units one
after the other, and each unit row by row: `[rows / 8][blocks][units][8 rows][width]`. A unit of 4
bytes makes a 32-byte vector whose byte `row * 4 + t` belongs to column `4 v + t`, which is what
byte dot products want.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xpuc.schedules.packed import Bytes

ROWS = 8  # rows of a group
_CHUNK_BYTES = 1 << 20  # packed at a time, so that temporaries stay in the cache


def interleave(field: NDArray[np.generic], out: NDArray[np.generic]) -> None:
    """Write a field (rows, blocks, units, width) of whole row groups into its part of the plane."""
    rows, blocks, units, width = field.shape
    word = f"u{width * field.dtype.itemsize}"
    words = np.ascontiguousarray(field).view(word).reshape(rows // ROWS, ROWS, blocks * units)
    lanes = out.view(word).reshape(rows // ROWS, blocks * units, ROWS)
    for row in range(ROWS):  # faster than one transposed copy, whose inner loop numpy makes short
        lanes[:, :, row] = words[:, row]


def row_chunks(raw: Bytes) -> list[tuple[int, Bytes]]:
    """Raw rows (rows, row_bytes) in runs of whole groups, the last one filled up with zero rows.

    Each comes with the number of its first group.
    """
    rows, row_bytes = raw.shape
    step = max(1, _CHUNK_BYTES // max(1, row_bytes * ROWS)) * ROWS
    return [
        (start // ROWS, _whole_groups(raw[start : start + step])) for start in range(0, rows, step)
    ]


def _whole_groups(raw: Bytes) -> Bytes:
    missing = -len(raw) % ROWS
    return np.pad(raw, ((0, missing), (0, 0))) if missing else raw
