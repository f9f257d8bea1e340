"""The arrays of a layer's K/V pool, as kernels read and write them.

In q8_0 a scale is never multiplied with codes, of which there are many: that of a key is with the
sum of the products of its codes, that of a value with the weight of its token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from xpuc.artifact import KV_GROUP, pool_arrays
from xpuc.schedules.attention_job import GROUP, PoolLayer
from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.accumulators import Accumulators
from xpuc.schedules.llvm.quantize import quantize_group
from xpuc.schedules.llvm.tir import Buffer, Expr

_LINE = 64  # bytes of a cache line

Load = Callable[[Expr, int], Expr]  # (column, lanes) -> f32 value
Store = Callable[[Expr, Expr, int], None]  # (column, f32 value, lanes)


class Layer(PoolLayer, Protocol):
    """What the arrays of a pool follow from; vectors are of `lanes` numbers."""

    @property
    def lanes(self) -> int: ...


class Place(NamedTuple):
    """Where a token of one head, or the first of a group, lies in each array of a pool."""

    block: Expr
    head: Expr
    offset: Expr


def check(layer: Layer) -> None:
    """Assert what kernels take for granted of heads and blocks."""
    multiple = KV_GROUP if layer.kv_dtype == "q8_0" else layer.lanes
    assert layer.head_dim % multiple == 0, f"head size {layer.head_dim}"
    assert layer.block_tokens % GROUP == 0, f"blocks of {layer.block_tokens} tokens"


def declare(layer: Layer) -> Pool:
    """Declare the arrays of the pool as the next arguments of the kernel."""
    blocks = tir.rows_var("n_blocks")
    arrays = pool_arrays(layer.kv_dtype, layer.block_tokens, layer.kv_heads, layer.head_dim)
    buffers = {a.name: tir.arg(a.name, (blocks, *a.shape), a.dtype) for a in arrays}
    return (Q8Pool if layer.kv_dtype == "q8_0" else Pool)(layer, **buffers)


@dataclass(frozen=True)
class Weights:
    """What the values of groups g0 to g1 of a segment are weighted with.

    `buffer` has that of query i and token t at i * pitch + t, `scaled` the same times a scale of
    the values; `place` is where a group lies.
    """

    buffer: Buffer
    scaled: Buffer
    queries: Expr
    pitch: int
    groups: tuple[Expr, Expr]
    place: Callable[[Expr], Place]


@dataclass(frozen=True)
class Pool:
    """float16 or float32: the numbers themselves."""

    layer: Layer
    keys: Buffer
    values: Buffer

    @property
    def columns(self) -> int:
        """Columns of a head that share a scale, all where there is none."""
        return self.layer.head_dim

    @property
    def item_bytes(self) -> int:
        """Of a number, scales apart."""
        return tir.size_of(str(self.keys.dtype))

    @property
    def keys_of_line(self) -> int:
        """Dimensions of a group's keys that share a cache line."""
        return max(1, _LINE // (self.layer.block_tokens * self.item_bytes))

    @property
    def key_lines(self) -> int:
        """Cache lines that hold a group's keys."""
        return self.layer.head_dim // self.keys_of_line

    def key(self, place: Place, d: Expr, v: int) -> Expr:
        """Vector v of dimension d of the keys of a group, in f32, without their scales."""
        lanes = self.layer.lanes
        return self._f32(tir.load(self.keys, (*place[:2], d, place.offset + v * lanes), lanes))

    def value(self, place: Place, t: Expr, d: Expr) -> Expr:
        """The vector at dimension d of token t of a group's values, in f32, without its scale."""
        index = (*place[:2], place.offset + t, d)
        return self._f32(tir.load(self.values, index, self.layer.lanes))

    def dots(
        self,
        groups: Sequence[Place],
        queries: int,
        step: int,
        add: Callable[[Accumulators, Expr], None],
    ) -> Accumulators:
        """The dot products of some queries with the keys of some groups.

        `add` adds the products of step i, which is of `step` dimensions.
        """
        dots = self._accumulators(groups, queries)
        with tir.serial(0, self.layer.head_dim // step) as i:
            add(dots, i)
        return dots

    def scaled(self, weights: Buffer, size: int) -> Buffer:
        """A buffer for that many scaled weights: `weights` themselves where there is no scale."""
        return weights

    @contextmanager
    def parts(self, weights: Weights) -> Iterator[tuple[Expr, Buffer]]:
        """The loop over parts of `columns` columns of the values, entered by `with`.

        Gives the number of the part, and the buffer of the weights of its values.
        """
        yield 0, weights.buffer

    def fetch_keys(self, place: Place, line: Expr) -> None:
        """Ask for cache line `line` of the `key_lines` of a group."""
        tir.prefetch(self.keys, (*place[:2], line * self.keys_of_line, place.offset))

    def fetch_values(self, place: Place, i: Expr, step: int) -> None:
        """Ask for as many of a group's values, which lie together, as step `i` has keys."""
        share = step * GROUP
        for element in range(0, share, _LINE // self.item_bytes):
            tir.prefetch(self.values, (*place, share * i + element))

    def fetch_key_scales(self, place: Place, share: Expr = 0, shares: int = 1) -> None:
        """Ask for one of so many shares of the scales of a group's keys, where it has some."""

    def fetch_value_scales(self, place: Place) -> None:
        """Ask for the scales of a group's values, where it has some."""

    def write_key(self, place: Place, emit: Callable[[Store], None]) -> None:
        """Write the key of a token: the columns that `emit` stores."""
        # A key lies across its block, one element in each row: turned in a buffer of its own first.
        dtype = str(self.keys.dtype)
        turned = tir.scratch(self.layer.head_dim, dtype)
        emit(lambda c, value, lanes: tir.store(turned, c, tir.cast(value, dtype, lanes), lanes))
        self._spread(place, turned)

    def write_value(self, place: Place, load: Load) -> None:
        """Write the value of a token."""
        dtype, lanes = str(self.values.dtype), self.layer.lanes
        with tir.serial(0, self.layer.head_dim // lanes) as i:
            c = i * lanes
            value = load(c, lanes)
            tir.store(self.values, (*place, c), tir.cast(value, dtype, lanes), lanes)

    def _accumulators(self, groups: Sequence[Place], queries: int) -> Accumulators:
        lanes = self.layer.lanes
        return Accumulators(queries, len(groups) * (GROUP // lanes), lanes)

    def _spread(self, place: Place, turned: Buffer) -> None:
        with tir.serial(0, self.layer.head_dim) as d:
            tir.store(self.keys, (*place[:2], d, place.offset), turned[d], 1)

    def _f32(self, value: Expr) -> Expr:
        same = self.item_bytes == tir.size_of("float32")
        return value if same else tir.cast(value, "float32", self.layer.lanes)


@dataclass(frozen=True)
class Q8Pool(Pool):
    """q8_0: `keys` and `values` are codes, with a scale for 32 columns of a token."""

    key_scales: Buffer
    value_scales: Buffer

    @property
    def columns(self) -> int:
        return KV_GROUP

    def dots(
        self,
        groups: Sequence[Place],
        queries: int,
        step: int,
        add: Callable[[Accumulators, Expr], None],
    ) -> Accumulators:
        totals, vectors = self._accumulators(groups, queries), GROUP // self.layer.lanes
        steps = KV_GROUP // step
        with tir.serial(0, self.layer.head_dim // KV_GROUP) as part:
            dots = self._accumulators(groups, queries)
            with tir.serial(0, steps) as i:
                add(dots, tir.let(part * steps + i))
            dots.scale_into(
                totals,
                lambda v: self._scale(self.key_scales, groups[v // vectors], part, v % vectors),
            )
        return totals

    def scaled(self, weights: Buffer, size: int) -> Buffer:
        return tir.scratch(size, "float32")

    @contextmanager
    def parts(self, weights: Weights) -> Iterator[tuple[Expr, Buffer]]:
        lanes = self.layer.lanes
        with tir.serial(0, self.layer.head_dim // KV_GROUP) as part:
            with tir.serial(*weights.groups) as g:
                place = weights.place(g)
                vectors = range(GROUP // lanes)
                scales = [tir.let(self._scale(self.value_scales, place, part, v)) for v in vectors]
                with tir.serial(0, weights.queries) as i:
                    for v, scale in enumerate(scales):
                        t = i * weights.pitch + g * GROUP + v * lanes
                        value = tir.load(weights.buffer, t, lanes) * scale
                        tir.store(weights.scaled, t, value, lanes)
            yield part, weights.scaled

    def fetch_key_scales(self, place: Place, share: Expr = 0, shares: int = 1) -> None:
        self._fetch_scales(self.key_scales, place, share, shares)

    def fetch_value_scales(self, place: Place) -> None:
        self._fetch_scales(self.value_scales, place, 0, 1)

    def write_key(self, place: Place, emit: Callable[[Store], None]) -> None:
        head_dim = self.layer.head_dim
        turned, codes = tir.scratch(head_dim, "float32"), tir.scratch(head_dim, "int8")
        emit(lambda c, value, lanes: tir.store(turned, c, value, lanes))
        with tir.serial(0, head_dim // KV_GROUP) as part:
            scale = self._quantize(part, lambda c, lanes: tir.load(turned, c, lanes), codes, ())
            tir.store(self.key_scales, (*place[:2], part, place.offset), scale, 1)
        self._spread(place, codes)

    def write_value(self, place: Place, load: Load) -> None:
        with tir.serial(0, self.layer.head_dim // KV_GROUP) as part:
            scale = self._quantize(part, load, self.values, place)
            tir.store(self.value_scales, (*place[:2], part, place.offset), scale, 1)

    def _quantize(self, part: Expr, load: Load, codes: Buffer, place: tuple[Expr, ...]) -> Expr:
        """Quantise a part of a token's columns into `codes`; their scale, f16."""
        lanes = self.layer.lanes
        columns = [tir.let(part * KV_GROUP + i) for i in range(0, KV_GROUP, lanes)]
        scale, quants = quantize_group([load(c, lanes) for c in columns], lanes)
        for c, quant in zip(columns, quants, strict=True):
            tir.store(codes, (*place, c), quant, lanes)
        return tir.cast(scale, "float16")

    def _scale(self, scales: Buffer, place: Place, part: Expr, v: int) -> Expr:
        """Vector v of a group's scales of a part, in f32."""
        lanes = self.layer.lanes
        return self._f32(tir.load(scales, (*place[:2], part, place.offset + v * lanes), lanes))

    def _fetch_scales(self, scales: Buffer, place: Place, share: Expr, shares: int) -> None:
        parts_of_line = max(1, _LINE // (self.layer.block_tokens * tir.size_of("float16")))
        lines = -(-self.layer.head_dim // (KV_GROUP * parts_of_line))
        each = -(-lines // shares)
        for line in range(each):
            part = (share * each + line) * parts_of_line
            tir.prefetch(scales, (*place[:2], part, place.offset))
