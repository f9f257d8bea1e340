"""The tensors behind a block pool: K and V of some layers, a block at the same place in all."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from xpuc.artifact import KvLayout
from xpuc.runtime.places import Place, Process

T = TypeVar("T")


class KvPool:
    """K/V of `n_blocks` blocks, in the layers of one window.

    layers       by number the arrays that KvLayout describes: all blocks, or where tensors do not
                 lie in the process's memory one, which stands for whichever is sent or fetched
    tensors      by number those of these arrays, which the model reads and writes
    block_bytes  of one block in all of them
    """

    def __init__(
        self, n_blocks: int, layout: KvLayout, window: int = 0, place: Place | None = None
    ) -> None:
        self._place = place or Process()
        n_held = n_blocks if self._place.is_host else 1
        self.layers: dict[int, tuple[npt.NDArray[Any], ...]] = {
            layer: tuple(
                pages((n_held, *array.shape), array.dtype) for array in layout.arrays(layer)
            )
            for layer, (*_, seen) in enumerate(layout.layers)
            if seen == window
        }
        self.tensors = {
            layer: tuple(self._place.rows(array, n_blocks) for array in arrays)
            for layer, arrays in self.layers.items()
        }
        arrays = in_layer_order([self.layers])
        self._bytes = [each.reshape(n_held, -1).view(np.uint8) for each in arrays]
        self.block_bytes = sum(each.shape[1] for each in self._bytes)

    def copy(self, source: int, destination: int) -> None:
        """Block `destination` holds what `source` does, in every layer."""
        for array, tensor in self._pairs():
            self._place.copy_row(array, tensor, source, destination)

    def fetch(self, block: int) -> list[npt.NDArray[np.uint8]]:
        """What the block holds: its buffers."""
        for array, tensor in self._pairs():
            self._place.fetch_row(tensor, array, block)
        return self.buffers(block)

    def send(self, block: int) -> None:
        """The block holds what was written to its buffers."""
        for array, tensor in self._pairs():
            self._place.send_row(array, tensor, block)

    def _pairs(self) -> Iterator[tuple[npt.NDArray[Any], Any]]:
        """Each array and its tensor."""
        for layer, arrays in self.layers.items():
            yield from zip(arrays, self.tensors[layer], strict=True)

    def buffers(self, block: int) -> list[npt.NDArray[np.uint8]]:
        """The block's memory in each array, `block_bytes` in all; no copies."""
        return [each[block if self._place.is_host else 0] for each in self._bytes]


def in_layer_order(groups: Iterable[Mapping[int, tuple[T, ...]]]) -> list[T]:
    """What all layers have, by their numbers in several mappings, as a step takes it."""
    layers = {layer: each for group in groups for layer, each in group.items()}
    return [each for layer in sorted(layers) for each in layers[layer]]


def pages(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Zeros in pages of their own; the system hands out each when it is first written.

    An allocator would give such an array memory that it has used, and clear all of it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)
