"""The tensors behind the block pool: K and V of each layer, a block at the same place in all."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from xpuc.artifact import KvLayout


class KvPool:
    """K/V of `n_blocks` blocks.

    arrays       K then V of each layer, as KvLayout describes them; the model reads and writes them
    block_bytes  of one block in all of them
    """

    def __init__(self, n_blocks: int, layout: KvLayout) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        for kv_heads, head_dim, _ in layout.layers:
            shape = (n_blocks, kv_heads, head_dim, layout.block_tokens)
            self.arrays.append(pages(shape, layout.dtype))
            self.arrays.append(pages((*shape[:2], shape[3], shape[2]), layout.dtype))
        self._bytes = [each.reshape(n_blocks, -1).view(np.uint8) for each in self.arrays]
        self.block_bytes = sum(each.shape[1] for each in self._bytes)

    def copy(self, source: int, destination: int) -> None:
        """Block `destination` holds what `source` does, in every layer."""
        for each in self._bytes:
            each[destination] = each[source]

    def buffers(self, block: int) -> list[npt.NDArray[np.uint8]]:
        """The block's own memory in each of `arrays`, `block_bytes` in all; no copies."""
        return [each[block] for each in self._bytes]


def pages(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Zeros in pages of their own; the system hands out each when it is first written.

    An allocator would give such an array memory that it has used, and clear all of it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)
