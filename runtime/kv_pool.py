"""The tensors behind a block pool: K and V of some layers, a block at the same place in all."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from xpuc.artifact import KvLayout


class KvPool:
    """K/V of `n_blocks` blocks, in the layers of one window.

    layers       by number the arrays that KvLayout describes; the model reads and writes them
    block_bytes  of one block in all of them
    """

    def __init__(self, n_blocks: int, layout: KvLayout, window: int = 0) -> None:
        self.layers: dict[int, tuple[npt.NDArray[Any], ...]] = {
            layer: tuple(
                pages((n_blocks, *array.shape), array.dtype) for array in layout.arrays(layer)
            )
            for layer, (*_, seen) in enumerate(layout.layers)
            if seen == window
        }
        self._bytes = [each.reshape(n_blocks, -1).view(np.uint8) for each in in_layer_order([self])]
        self.block_bytes = sum(each.shape[1] for each in self._bytes)

    def copy(self, source: int, destination: int) -> None:
        """Block `destination` holds what `source` does, in every layer."""
        for each in self._bytes:
            each[destination] = each[source]

    def buffers(self, block: int) -> list[npt.NDArray[np.uint8]]:
        """The block's own memory in each array, `block_bytes` in all; no copies."""
        return [each[block] for each in self._bytes]


def in_layer_order(pools: Iterable[KvPool]) -> list[npt.NDArray[Any]]:
    """The arrays of all layers, as a step takes them."""
    layers = {layer: arrays for pool in pools for layer, arrays in pool.layers.items()}
    return [array for layer in sorted(layers) for array in layers[layer]]


def pages(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Zeros in pages of their own; the system hands out each when it is first written.

    An allocator would give such an array memory that it has used, and clear all of it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)
