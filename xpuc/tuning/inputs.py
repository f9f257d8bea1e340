"""What a kernel is measured with and checked by: random activations, weights and contexts.

Nothing here needs the compiler: a GPU box draws the same arrays from the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from xpuc.artifact import PoolArray, pool_arrays
from xpuc.errors import UnsupportedError, nearest
from xpuc.ir.activation import Q8_BLOCK, Q8_HALF
from xpuc.ir.formats import format_of, random_blocks
from xpuc.runtime.batch import balanced

_BLOCKS = 512  # different blocks a random matrix is put together from
_SMALLEST = 2.0**-7  # a block's largest weight is this at least, and 1 at most
_BYTES_AT_ONCE = 1 << 24  # of a matrix, so that the indices of its blocks stay small
_SPREAD = 16.0  # activations times the root of their columns: sums are then a few units
_SCORE = 2.0  # the standard deviation of attention scores


class Weight(Protocol):
    """A packed matrix of a site."""

    @property
    def format(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


class Site(Protocol):
    """What arrays follow from of an operation's place; schedules.Site is one."""

    @property
    def op(self) -> str: ...

    @property
    def attrs(self) -> Mapping[str, Any]: ...

    @property
    def n(self) -> int | None: ...

    @property
    def weights(self) -> Sequence[Weight]: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def kv_dtype(self) -> str: ...

    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Matrix:
    """A matrix put together from a few blocks: uint8 (count, block bytes), and which of them lies
    where, uint16 (rows, blocks of a row)."""

    format: str
    blocks: np.ndarray
    chosen: np.ndarray

    def raw(self) -> np.ndarray:
        """As a GGUF file has it: uint8 (rows, row bytes)."""
        rows, count = self.chosen.shape
        table = self.blocks.view(f"V{self.blocks.shape[1]}")[:, 0]  # copied whole, by number
        raw = np.empty((rows, count * self.blocks.shape[1]), np.uint8)
        step = max(1, _BYTES_AT_ONCE // raw.shape[1])
        for start in range(0, rows, step):
            part = raw[start : start + step]
            part[:] = table[self.chosen[start : start + step]].view(np.uint8).reshape(part.shape)
        return raw


@dataclass(frozen=True)
class Layout:
    """How a target lays out what its kernels read.

    `blocks(format)` are what matrices are put together from (see matrix_blocks); `pack(matrix,
    raw)` gives a matrix's planes, in order; `tile_rows` are those of a prefill tile,
    `segment_tokens` those of a work item, of attention.
    """

    blocks: Callable[[str], np.ndarray]
    pack: Callable[[Matrix, np.ndarray], Sequence[np.ndarray]]
    tile_rows: int
    segment_tokens: int


# Compared by identity: what follows from a case can be kept for as long as it lives.
@dataclass(frozen=True, eq=False)
class Case:
    """The arrays of one call of `rows` rows.

    `operands` and `planes` are those of the site, in order, the latter for each of its weights;
    `raw` are the weights as a GGUF file has them, uint8 (rows, row bytes). `symbols` gives the
    value of every symbol in the operands' shapes.
    """

    rows: int
    operands: tuple[np.ndarray, ...]
    planes: tuple[tuple[np.ndarray, ...], ...]
    raw: tuple[np.ndarray, ...]
    symbols: dict[str, int]


@dataclass(frozen=True)
class _Call:
    """A call to make up: `depth` is the context of a decode call, or what lies before a prefill."""

    site: Site
    layout: Layout
    rows: int
    depth: int
    rng: np.random.Generator


def draw(site: Site, layout: Layout, rows: int, *, depth: int = 1024, seed: int = 0) -> Case:
    """Random arrays for a call of the site with `rows` rows.

    Attention has `depth` tokens of context: with a fixed number of rows, each is the last token of
    a sequence of its own; else they follow `depth` tokens of one sequence. UnsupportedError if
    nothing is known of the operation.
    """
    call = _Call(site, layout, rows, depth, np.random.default_rng(seed))
    operands = _operands(call)
    matrices = [_matrix(w, layout.blocks(w.format), call.rng) for w in site.weights]
    raw = tuple(matrix.raw() for matrix in matrices)
    planes = tuple(tuple(layout.pack(m, r)) for m, r in zip(matrices, raw, strict=True))
    return Case(rows, operands, planes, raw, _symbols(site, operands))


def symbols(site: Site, layout: Layout, rows: int, *, depth: int = 1024) -> dict[str, int]:
    """`Case.symbols` of a call as `draw` makes it up, whose weights need not be drawn for them."""
    call = _Call(site, layout, rows, depth, np.random.default_rng(0))
    return _symbols(site, _operands(call))


def _operands(call: _Call) -> tuple[np.ndarray, ...]:
    site = call.site
    assert call.rows == (site.n or call.rows), f"{call.rows} rows at a site for {site.n}"
    if site.op not in _OPERANDS:
        raise UnsupportedError(f"no inputs for operation {site.op}", nearest(site.op, _OPERANDS))
    return _OPERANDS[site.op](call)


def _symbols(site: Site, operands: tuple[np.ndarray, ...]) -> dict[str, int]:
    """The symbols of the operands' types by what these arrays have in their place."""
    symbols: dict[str, int] = {}
    for (dtype, *shape), array in zip(site.facts()["operands"], operands, strict=True):
        assert str(array.dtype) == dtype, f"{array.dtype} for {dtype}"
        for dimension, size in zip(shape, array.shape, strict=True):
            if isinstance(dimension, str):
                dimension = symbols.setdefault(dimension, size)
            assert dimension == size, f"{array.shape} for {shape}"
    return symbols


def _matrix(weight: Weight, blocks: np.ndarray, rng: np.random.Generator) -> Matrix:
    """A matrix of random blocks of these."""
    shape = (weight.rows, weight.columns // format_of(weight.format).n)
    return Matrix(weight.format, blocks, rng.integers(0, len(blocks), shape, dtype=np.uint16))


@cache
def matrix_blocks(name: str) -> np.ndarray:
    """What a random matrix of a format is put together from: uint8 (512, block bytes)."""
    return random_blocks(format_of(name), _SMALLEST, 1, _BLOCKS)[:_BLOCKS]


def _projection(call: _Call) -> tuple[np.ndarray, ...]:
    """An activation, quantised or not, then a vector of f32 for each bias."""
    first, *_ = types = call.site.facts()["operands"]
    if first[0] == "int8":
        activation, biases = _q8a(call, blocks=first[1]), types[4:]
    else:
        largest = _SPREAD / math.sqrt(first[2])
        activation = (_uniform(call.rng, (call.rows, first[2]), largest),)
        biases = types[1:]
    return (*activation, *(_uniform(call.rng, (size,), 1.0) for _, size in biases))


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], largest: float) -> np.ndarray:
    return rng.uniform(-largest, largest, shape).astype(np.float32)


def _q8a(call: _Call, blocks: int) -> tuple[np.ndarray, ...]:
    """The four tensors of a quantised activation of 32 `blocks` columns (docs/formats.md)."""
    shape = (blocks, call.rows, Q8_BLOCK // Q8_HALF)
    largest = _SPREAD / math.sqrt(blocks * Q8_BLOCK)
    scale = (call.rng.uniform(0.5, 1.5, shape) * largest / 127).astype(np.float32)
    quants = call.rng.integers(-127, 128, (*shape, Q8_HALF), dtype=np.int8)
    counts = quants.sum(axis=3, dtype=np.int32).astype(np.float32)
    sums = scale * counts
    # A product of 24 and 12 bits is exact in float64, so this rounds once, like an fma.
    both = scale[..., 1].astype(np.float64) * counts[..., 1] + sums[..., 0]
    return quants.reshape(blocks, call.rows, Q8_BLOCK), scale, sums, both.astype(np.float32)


def _attention(call: _Call) -> tuple[np.ndarray, ...]:
    """Queries, the pools, and the index arrays as `runtime.batch` lays them out."""
    if call.site.n is None:
        sequences, context = 1, call.depth + call.rows
        positions = np.arange(call.depth, context, dtype=np.int32)
        tiles = _prefill_tiles(call)
    else:
        sequences, context = call.rows, call.depth
        positions = np.full(call.rows, context - 1, np.int32)
        tiles = [(row, 1, row, context - 1) for row in range(call.rows)]
    table, pool = _pool(call, sequences, context)
    attrs = call.site.attrs
    width = attrs["heads"] * attrs["head_dim"]
    gain = _SCORE / (attrs["scale"] * math.sqrt(attrs["head_dim"]))
    q = call.rng.standard_normal((call.rows, width), np.float32) * np.float32(gain)
    return (q, *pool, positions, *_indices(tiles, call.layout.segment_tokens), table)


_Tile = tuple[int, int, int, int]  # first row, rows, sequence, last position


def _prefill_tiles(call: _Call) -> list[_Tile]:
    most = call.layout.tile_rows
    tiles = []
    for first in range(0, call.rows, most):
        count = min(most, call.rows - first)
        tiles.append((first, count, 0, call.depth + first + count - 1))
    return balanced(tiles)


def _indices(tiles: list[_Tile], segment_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """`tiles` (t, 4) and `work` (w, 4): every segment of each tile's context, in order."""
    rows: list[tuple[int, ...]] = []
    work: list[tuple[int, ...]] = []
    for row, count, sequence, last in tiles:
        segments = last // segment_tokens + 1
        rows.append((row, count, len(work), segments))
        work += [(row, count, sequence, segment) for segment in range(segments)]
    return np.array(rows, np.int32), np.array(work, np.int32)


def _pool(call: _Call, sequences: int, context: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The block table and the pool of sequences in shuffled blocks.

    What lies behind a sequence's last token is NaN, as it may be: no kernel lets it count.
    """
    attrs, tokens = call.site.attrs, call.site.block_tokens
    per_sequence = -(-context // tokens)
    table = call.rng.permutation(sequences * per_sequence).astype(np.int32)
    table = table.reshape(sequences, per_sequence)
    used = context - (per_sequence - 1) * tokens
    arrays = []
    for array in pool_arrays(call.site.kv_dtype, tokens, attrs["kv_heads"], attrs["head_dim"]):
        drawn = _numbers(call.rng, array, table.size)
        if array.dtype != "int8":
            # Tokens come last, but in the values themselves.
            unused = np.s_[:, :, used:] if array.name == "values" else np.s_[..., used:]
            behind = drawn[table[:, -1]]
            behind[unused] = np.nan
            drawn[table[:, -1]] = behind
        arrays.append(drawn)
    return table, arrays


def _numbers(rng: np.random.Generator, array: PoolArray, blocks: int) -> np.ndarray:
    """Keys or values of a standard deviation of 1, or the codes and the scales of such."""
    shape = (blocks, *array.shape)
    if array.dtype == "int8":
        return rng.integers(-127, 128, shape, dtype=np.int8)
    if array.name in ("keys", "values"):
        return rng.standard_normal(shape, np.float32).astype(array.dtype)
    return (rng.uniform(0.5, 1.5, shape) * math.sqrt(3) / 127).astype(array.dtype)


_OPERANDS: dict[str, Callable[[_Call], tuple[np.ndarray, ...]]] = {
    "linear": _projection,
    "linear_group": _projection,
    "gate_up": _projection,
    "head_argmax": _projection,
    "attention": _attention,
}
