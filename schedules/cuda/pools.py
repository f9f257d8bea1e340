"""The arrays of a layer's K/V pool, as kernels of a GPU read and write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xpuc.artifact import KV_GROUP, pool_arrays
from xpuc.schedules.attention_job import GROUP, PoolLayer
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.quantize import quantize_group
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, Threads

VECTOR = 8  # elements that a lane loads at a time
_LOAD_BYTES = 16

Load = Callable[[Expr], Expr]  # column of a head -> f32
Store = Callable[[Expr, Expr], None]  # (column of a head, f32)


class Place(NamedTuple):
    """Where a token of one head lies in each array of a pool."""

    block: Expr
    head: Expr
    offset: Expr


def declare(layer: PoolLayer) -> Pool:
    """Declare the arrays of the pool as the next arguments of the kernel."""
    multiple = KV_GROUP if layer.kv_dtype == "q8_0" else 1
    assert layer.head_dim % multiple == 0, f"head size {layer.head_dim}"
    assert layer.block_tokens % GROUP == 0, f"blocks of {layer.block_tokens} tokens"
    blocks = tir.rows_var("n_blocks")
    arrays = pool_arrays(layer.kv_dtype, layer.block_tokens, layer.kv_heads, layer.head_dim)
    buffers = {a.name: tir.arg(a.name, (blocks, *a.shape), a.dtype) for a in arrays}
    return (Q8Pool if layer.kv_dtype == "q8_0" else Pool)(layer, **buffers)


@dataclass(frozen=True)
class Pool:
    """float16 or float32: the numbers themselves."""

    layer: PoolLayer
    keys: Buffer
    values: Buffer

    def load_keys(self, into: Buffer, place: Place, d: Expr) -> None:
        """Dimension d of the keys of 8 tokens, from an offset that is a multiple of 8.

        `into` is f32 or f16, as for values.
        """
        _load(into, self.keys, (*place[:2], d, _aligned(place.offset)))

    def load_values(self, into: Buffer, place: Place, d: Expr) -> None:
        """8 dimensions of a token's value, from d, a multiple of 8."""
        _load(into, self.values, (*place, d))

    def write_key(self, place: Place, threads: Threads, emit: Callable[[Store], None]) -> None:
        """Write the key of a token: the columns that the lanes of a warp store with `emit`."""
        dtype = str(self.keys.dtype)
        emit(
            lambda c, value: tir.store(
                self.keys, (*place[:2], c, place.offset), tir.cast(value, dtype)
            )
        )

    def write_value(self, place: Place, threads: Threads, load: Load) -> None:
        """Write the value of a token; the lanes of a warp share its columns."""
        dtype = str(self.values.dtype)
        share(
            self.layer.head_dim, threads.lane,
            lambda c: tir.store(self.values, (*place, c), tir.cast(load(c), dtype)),
        )  # fmt: skip


@dataclass(frozen=True)
class Q8Pool(Pool):
    """q8_0: `keys` and `values` are codes, with a scale for 32 columns of a token."""

    key_scales: Buffer
    value_scales: Buffer

    def load_keys(self, into: Buffer, place: Place, d: Expr) -> None:
        offset = _aligned(place.offset)
        scales = _vector(self.key_scales, (*place[:2], d // KV_GROUP, offset))
        codes = _vector(self.keys, (*place[:2], d, offset))
        for i in range(VECTOR):
            value = tir.cast(codes[i], "float32") * tir.cast(scales[i], "float32")
            tir.store(into, i, tir.cast(value, str(into.dtype)))

    def load_values(self, into: Buffer, place: Place, d: Expr) -> None:
        scale = self.value_scales[(*place[:2], d // KV_GROUP, place.offset)]
        scale = tir.let(tir.cast(scale, "float32"))
        codes = _vector(self.values, (*place, d))
        for i in range(VECTOR):
            value = tir.cast(codes[i], "float32") * scale
            tir.store(into, i, tir.cast(value, str(into.dtype)))

    def write_key(self, place: Place, threads: Threads, emit: Callable[[Store], None]) -> None:
        # A lane has its columns in the order in which they turn, not those of one scale.
        turned = tir.shared((threads.warps, self.layer.head_dim), "float32")
        emit(lambda c, value: tir.store(turned, (threads.warp, c), value))
        tir.sync_warp()
        self._quantize(
            threads.lane, lambda c: turned[threads.warp, c],
            lambda c, code: tir.store(self.keys, (*place[:2], c, place.offset), code),
            lambda part, scale: tir.store(
                self.key_scales, (*place[:2], part, place.offset), scale
            ),
        )  # fmt: skip

    def write_value(self, place: Place, threads: Threads, load: Load) -> None:
        self._quantize(
            threads.lane, load,
            lambda c, code: tir.store(self.values, (*place, c), code),
            lambda part, scale: tir.store(
                self.value_scales, (*place[:2], part, place.offset), scale
            ),
        )  # fmt: skip

    def _quantize(
        self, lane: Expr, load: Load, store_code: Store, store_scale: Callable[[int, Expr], None]
    ) -> None:
        """Quantise a token's columns, those of one scale at a time, a lane each."""
        for part in range(self.layer.head_dim // KV_GROUP):
            column = tir.let(part * KV_GROUP + lane)
            scale, code = quantize_group(tir.let(load(column)))
            store_code(column, code)
            with tir.when(lane == 0):
                store_scale(part, scale)


def share(count: int, lane: Expr, visit: Callable[[Expr], None]) -> None:
    """`visit` each of `count` numbers, the lanes of a warp in turn."""
    for first in range(0, count, WARP):
        number = tir.let(lane + first)
        with tir.when(number < count):
            visit(number)


def _aligned(offset: Expr) -> Expr:
    """A multiple of 8, said so that TVM knows it and makes one load of a vector."""
    return offset // VECTOR * VECTOR


def _vector(source: Buffer, index: tuple[Expr, ...]) -> Buffer:
    """Registers with 8 elements as they are stored, by loads of up to 16 bytes."""
    dtype = str(source.dtype)
    lanes = min(VECTOR, _LOAD_BYTES // np.dtype(dtype).itemsize)
    part, (*outer, last) = tir.registers(VECTOR, dtype), index
    for first in range(0, VECTOR, lanes):
        tir.store(part, first, tir.load(source, (*outer, last + first), lanes), lanes)
    return part


def _load(into: Buffer, source: Buffer, index: tuple[Expr, ...]) -> None:
    """8 elements, converted to the dtype of `into`."""
    part = _vector(source, index)
    for i in range(VECTOR):
        tir.store(into, i, tir.cast(part[i], str(into.dtype)))
