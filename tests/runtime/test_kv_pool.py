"""K/V tensors by block: copies, the memory a store reads and writes, and pages taken when used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xpuc.artifact import KvLayout
from xpuc.runtime.kv_pool import KvPool, in_layer_order, pages
from xpuc.runtime.places import Process

LAYERS = ((2, 8, 0), (1, 4, 16), (1, 2, 0))  # kv_heads, head_dim, window
LAYOUTS = {
    "float16": KvLayout("float16", 4, 16, 2, LAYERS),
    "float32": KvLayout("float32", 4, 16, 2, LAYERS),
    "q8_0": KvLayout("q8_0", 4, 16, 2, ((2, 64, 0), (1, 64, 16), (1, 32, 0))),
}
SHAPES = {
    "float16": [(5, 2, 8, 4), (5, 2, 4, 8), (5, 1, 2, 4), (5, 1, 4, 2)],
    "q8_0": [
        (5, 2, 64, 4), (5, 2, 2, 4), (5, 2, 4, 64), (5, 2, 2, 4),
        (5, 1, 32, 4), (5, 1, 1, 4), (5, 1, 4, 32), (5, 1, 1, 4),
    ],
}  # fmt: skip


def filled(dtype: str, window: int = 0) -> KvPool:
    """No element is zero, and no two blocks are equal."""
    kv = KvPool(5, LAYOUTS[dtype], window)
    for array in in_layer_order([kv.layers]):
        array[:] = 1 + np.arange(array.size).reshape(array.shape) % 101
    return kv


def resident() -> int:
    """Bytes of this process in pages of no file."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_buffers_are_the_blocks_own_memory(dtype: str) -> None:
    kv = filled(dtype)
    arrays = in_layer_order([kv.layers])
    assert [each.shape for each in arrays] == SHAPES["q8_0" if dtype == "q8_0" else "float16"]
    assert kv.block_bytes == LAYOUTS[dtype].block_bytes(0)
    buffers = kv.buffers(3)
    assert sum(memoryview(each).cast("B").nbytes for each in buffers) == kv.block_bytes
    for buffer, array in zip(buffers, arrays, strict=True):
        assert np.shares_memory(buffer, array)
        assert bytes(buffer) == array[3].tobytes()
        memoryview(buffer).cast("B")[:] = bytes(buffer.nbytes)
        assert not array[3].any()
        assert array[2].all()
        assert array[4].all()


def test_a_step_takes_the_arrays_of_all_pools_by_layer() -> None:
    full, windowed = filled("float16"), filled("float16", 16)
    shapes = [each.shape for each in in_layer_order([full.layers, windowed.layers])]
    assert shapes[2:4] == [(5, 1, 4, 4), (5, 1, 4, 4)]
    assert [*shapes[:2], *shapes[4:]] == [each.shape for each in in_layer_order([full.layers])]


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_a_copy_is_of_all_layers_and_of_one_block(dtype: str) -> None:
    kv, before = filled(dtype), filled(dtype)
    kv.copy(1, 3)
    for array, old in zip(
        in_layer_order([kv.layers]), in_layer_order([before.layers]), strict=True
    ):
        expected = old.copy()
        expected[3] = old[1]
        assert np.array_equal(array, expected)


class Elsewhere(Process):
    """Memory that the process does not see: tensors are arrays of their own."""

    is_host = False

    def rows(self, array: NDArray[Any], n: int) -> NDArray[Any]:
        return np.full((n, *array.shape[1:]), 1, array.dtype)

    def send_row(self, array: NDArray[Any], tensor: Any, row: int) -> None:
        tensor[row] = array[0]

    def fetch_row(self, tensor: Any, array: NDArray[Any], row: int) -> None:
        array[0] = tensor[row]


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_blocks_that_lie_elsewhere_take_the_process_the_memory_of_one(dtype: str) -> None:
    kv = KvPool(5, LAYOUTS[dtype], place=Elsewhere())
    assert sum(each.nbytes for each in in_layer_order([kv.layers])) == kv.block_bytes
    for block in (4, 0):
        for i, buffer in enumerate(kv.buffers(block)):
            buffer[:] = 16 * block + i
        kv.send(block)
    for block in (0, 4):
        for i, buffer in enumerate(kv.fetch(block)):
            assert (buffer == 16 * block + i).all()


def test_pages_are_zero_and_taken_when_written() -> None:
    before = resident()
    array = pages((64, 1024, 1024), "float16")
    assert (array.dtype, array.nbytes, array.ctypes.data % 64) == (np.float16, 128 << 20, 0)
    assert resident() - before < 16 << 20
    assert not array[:1].any()
    array[:1] = 1
    assert array[:1].all()
    assert not array[1].any()
