"""The greedy token of each row, without writing the logits."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.isa import Isa
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.products import (
    LinearKnobs,
    Part,
    Product,
    Tile,
    Weight,
    activation_args,
    kernel_name,
    operand_args,
    side_by_side,
    tile_rows,
    tiles,
    turn_groups,
)
from xpuc.schedules.llvm.tir import Buffer, Expr, T

_CHUNKS = 128  # parts of the vocabulary, whatever the number of threads
_INFINITY = 0x7F800000  # the bits of infinity: those of a NaN are more


def head_argmax(
    weight: Weight,
    k: int,
    n: int | None,
    *,
    activation: str,
    isa: Isa,
    knobs: LinearKnobs,
    n_vocab: int,
) -> tirx.PrimFunc:
    """argmax of x W^T over the first `n_vocab` rows of W: the lowest index wins, -1 if any is NaN.

    Arguments: q8a of (n, k), or x f32 (n, k) if `activation` is f32; the weight's planes; output
    ids int32 (n,). The products have the bits of `linear`.
    """
    assert 0 < n_vocab <= weight.rows
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = activation_args(activation, k, rows)
        operand = operand_args(weight, k, "w")
        ids = tir.arg("ids", (rows,), "int32")
        groups, count = -(-n_vocab // ROWS), side_by_side(rows, knobs)
        steps = -(-groups // count)
        size = -(-steps // _CHUNKS)
        chunks = -(-steps // size)
        found = _Best.of(rows * count * chunks)
        product = Product(x, isa, knobs)
        slots = tile_rows(rows, knobs.m_tile) * ROWS
        with tir.parallel(0, tir.long(chunks)) as chunk:
            accs = [tir.scratch(slots, "float32") for _ in range(count)]
            walks = [_Lanes.of(slots) for _ in range(count)]
            with tiles(rows, knobs.m_tile) as tile:
                for lanes in walks:
                    lanes.clear(tile)
                last = T.min(tir.long(steps), (chunk + 1) * size)
                with tir.serial(chunk * size, last) as step:
                    turn = zip(turn_groups(groups, step, count), accs, strict=True)
                    parts = [Part(operand, group, acc) for group, acc in turn]
                    product.emit(parts, tile)
                    for part, lanes in zip(parts, walks, strict=True):
                        lanes.update(part.group, tile, part.acc, n_vocab)
                for i, lanes in enumerate(walks):  # the second walk comes after all of the first
                    lanes.finish(tile, found, count * chunks, i * chunks + chunk)
        with tir.serial(0, rows) as row:
            found.reduce(row, count * chunks, ids)

    return tir.prim_func(kernel_name(f"argmax_{n_vocab}", (weight,), k, n, activation), body)


@dataclass(frozen=True)
class _Best:
    """The best value of each row in each chunk, and its index, -1 for a NaN: (rows, chunks)."""

    values: Buffer
    indices: Buffer

    @classmethod
    def of(cls, size: Expr) -> _Best:
        """Room for `size` of them."""
        return cls(tir.scratch(size, "float32"), tir.scratch(size, "int32"))

    def reduce(self, row: Expr, chunks: int, ids: Buffer) -> None:
        """The best of all chunks, which ascend."""
        value, index = tir.scratch(1, "float32"), tir.scratch(1, "int32")
        tir.store(value, 0, tir.load(self.values, row * chunks, 1), 1)
        tir.store(index, 0, tir.load(self.indices, row * chunks, 1), 1)
        with tir.serial(0, chunks) as chunk:
            slot = tir.let(row * chunks + chunk)
            new = tir.let(tir.load(self.values, slot, 1))
            at = tir.let(tir.load(self.indices, slot, 1))
            so_far = tir.let(tir.load(index, 0, 1))
            none = tir.const(-1, "int32")
            better = new > tir.load(value, 0, 1)
            tir.store(index, 0, T.Select(better, at, so_far), 1)
            tir.store(value, 0, T.max(new, tir.load(value, 0, 1)), 1)
            with tir.when(tirx.any(at == none, so_far == none)):
                tir.store(index, 0, none, 1)
        tir.store(ids, row, tir.load(index, 0, 1), 1)


@dataclass(frozen=True)
class _Lanes:
    """For each row of a tile and each of 8 lanes: the best value, its index, the largest bits."""

    best: Buffer
    index: Buffer
    bits: Buffer

    @classmethod
    def of(cls, size: int) -> _Lanes:
        """Room for `size` lanes."""
        return cls(*(tir.scratch(size, d) for d in ("float32", "int32", "int32")))

    def clear(self, tile: Tile) -> None:
        def one(i: Expr) -> None:
            lowest = tir.const(float("-inf"), "float32", ROWS)
            tir.store(self.best, i * ROWS, lowest, ROWS)
            for buffer in (self.index, self.bits):
                tir.store(buffer, i * ROWS, tir.const(0, "int32", ROWS), ROWS)

        tile.each(one)

    def update(self, group: Expr, tile: Tile, acc: Buffer, n_vocab: int) -> None:
        """Groups come in ascending order, so that of equals the first stays."""
        ids = tir.let(tirx.Ramp(tir.cast(group, "int32") * ROWS, 1, ROWS))

        def one(i: Expr) -> None:
            at = i * ROWS
            value = tir.load(acc, at, ROWS)
            if n_vocab % ROWS:
                inside = ids < tir.const(n_vocab, "int32", ROWS)
                value = T.Select(inside, value, tir.const(float("-inf"), "float32", ROWS))
            value = tir.let(value)
            best = tir.let(tir.load(self.best, at, ROWS))
            larger = value > best  # unnamed: TVM cannot bind a vector of booleans
            tir.store(self.best, at, T.Select(larger, value, best), ROWS)
            index = tir.load(self.index, at, ROWS)
            tir.store(self.index, at, T.Select(larger, ids, index), ROWS)
            magnitude = tir.bits(value, "int32", ROWS) & tir.const(0x7FFFFFFF, "int32", ROWS)
            tir.store(self.bits, at, T.max(tir.load(self.bits, at, ROWS), magnitude), ROWS)

        tile.each(one)

    def finish(self, tile: Tile, found: _Best, chunks: int, chunk: Expr) -> None:
        """The best lane of every row; the lowest index of equals."""

        def one(i: Expr) -> None:
            at = i * ROWS
            best = tir.let(tir.load(self.best, at, ROWS))
            top = tir.fold_float(best, ROWS, T.max)
            no_index = tir.const(0x7FFFFFFF, "int32", ROWS)
            index = T.Select(best == tir.splat(top, ROWS), tir.load(self.index, at, ROWS), no_index)
            index = tir.fold_int(index, ROWS, "smin")
            bits = tir.fold_int(tir.load(self.bits, at, ROWS), ROWS, "smax")
            is_nan = bits > tir.const(_INFINITY, "int32")
            slot = (tile.start + i) * chunks + chunk
            tir.store(found.values, slot, top, 1)
            tir.store(found.indices, slot, T.Select(is_nan, tir.const(-1, "int32"), index), 1)

        tile.each(one)
