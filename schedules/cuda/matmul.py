"""Projections of many rows on tensor cores: tiles of y = x W^T, the weights decoded on their way.

A block of threads makes a tile of y: `rows` activations by `columns` rows of the weight. Of 64
columns of x at a time, both operands are laid down in shared memory as f16, and the warps multiply
them by `mma` into f32. Sums run in another order than those of single rows (products.py), and both
factors are rounded to f16: results differ from theirs by some 1e-3 of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.gate_up import ACTS
from xpuc.schedules.cuda.groups import blocks_of, side_by_side, when_within
from xpuc.schedules.cuda.products import F32, Q8, Matrix, Weight, floats, lane_columns
from xpuc.schedules.cuda.tiles import Tile, TileKnobs
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, Threads
from xpuc.schedules.packed import COLUMNS

STEP = 64  # columns of x that are in shared memory at a time
_PAD = 8  # elements after a row there, so that 8 rows start in different banks


@dataclass(frozen=True)
class MatmulKnobs(TileKnobs):
    """Those of a tile."""

    rows: int = 64
    columns: int = 64
    row_warps: int = 2
    column_warps: int = 2


_DEFAULTS = MatmulKnobs()


def accepts(k: int) -> bool:
    """Whether x has whole steps of columns."""
    return k % STEP == 0


def matmul(
    weights: Sequence[Weight],
    k: int,
    *,
    activation: str,
    bias: Sequence[bool] = (),
    knobs: MatmulKnobs = _DEFAULTS,
) -> tirx.PrimFunc:
    """y f32 (n, sum of rows) = x W^T, plus a bias for each weight that has one; any n.

    Arguments: the activation of n rows (`q8`: xq, xd, xs, xt; `f32`: x), the planes of each weight,
    the biases f32 (rows,), y.
    """

    def body() -> None:
        n = tir.rows_var()
        x = _declare(activation, n, k)
        matrices = [weight.declare(f"w{i}", k) for i, weight in enumerate(weights)]
        parts = side_by_side(matrices, bias, knobs.columns)
        y = tir.arg("y", (n, sum(w.rows for w in weights)), "float32")
        grid = (blocks_of(parts), (n + knobs.rows - 1) // knobs.rows)
        threads = tir.launch(grid, knobs.warps)
        tile = _Tile(x, n, knobs, threads)
        for part in parts:
            with when_within(threads.block[0], part.first, part.count) as at:
                start = tir.let(at * knobs.columns)
                (sums,) = tile.multiply([part.matrix], start)
                tile.each(start, part.matrix.rows, part.storing(y, sums))

    names = "_".join(f"{w.format.lower()}_{w.rows}" for w in weights)
    words = [*(["bias"] if any(bias) else []), *(["f32"] if activation == "f32" else [])]
    return tir.prim_func("_".join(["matmul", names, f"x{k}", *words]), body)


def gated_matmul(
    gate: Weight,
    up: Weight,
    k: int,
    *,
    activation: str,
    act: str,
    knobs: MatmulKnobs = _DEFAULTS,
) -> tirx.PrimFunc:
    """h f32 (n, rows) = act(x gate^T) * (x up^T), for any n.

    Arguments: the activation of n rows, the planes of gate, then of up, h.
    """
    assert gate.rows == up.rows

    def body() -> None:
        n = tir.rows_var()
        x = _declare(activation, n, k)
        pair = gate.declare("gate", k), up.declare("up", k)
        h = tir.arg("h", (n, gate.rows), "float32")
        grid = (-(-gate.rows // knobs.columns), (n + knobs.rows - 1) // knobs.rows)
        threads = tir.launch(grid, knobs.warps)
        tile = _Tile(x, n, knobs, threads)
        start = tir.let(threads.block[0] * knobs.columns)
        gates, ups = tile.multiply(pair, start)

        def one(row: Expr, column: Expr, i: int) -> None:
            tir.store(h, (row, column), ACTS[act](gates[i]) * ups[i])

        tile.each(start, gate.rows, one)

    shape = f"{gate.format.lower()}_{up.format.lower()}_{gate.rows}x{k}"
    words = ["gated_matmul", act, *(["f32"] * (activation == "f32")), shape]
    return tir.prim_func("_".join(words), body)


def _declare(activation: str, n: Expr, k: int) -> Q8 | F32:
    assert accepts(k), f"{k} columns are not whole steps of {STEP}"
    return Q8.declare(n, k) if activation == "q8" else F32.declare(n, k)


class _Tile(Tile):
    """A tile whose operands are decoded to f16."""

    def __init__(self, x: Q8 | F32, n: Expr, knobs: MatmulKnobs, threads: Threads) -> None:
        super().__init__(n, knobs, threads)
        self.x, self.knobs = x, knobs
        self.row = tir.let(threads.warp // knobs.column_warps * (16 * knobs.row_tiles))
        self.column = tir.let(threads.warp % knobs.column_warps * (8 * knobs.column_tiles))
        self.a = tir.shared((knobs.rows, STEP + _PAD), "float16")

    def multiply(self, matrices: Sequence[Matrix], start: Expr) -> list[Buffer]:
        """The products with the rows of each matrix from `start` on: registers as `each` counts."""
        size = self.knobs.sums
        tiles = [tir.shared((self.knobs.columns, STEP + _PAD), "float16") for _ in matrices]
        sums = [tir.registers(size, "float32") for _ in matrices]
        for each in sums:
            for i in range(size):
                tir.store(each, i, tir.const(0.0, "float32"))
        with tir.serial(0, matrices[0].k // STEP) as step:
            tir.sync_block()
            self._fetch_x(step)
            for matrix, tile in zip(matrices, tiles, strict=True):
                self._fetch_weights(matrix, tile, start, step)
            tir.sync_block()
            for tile, each in zip(tiles, sums, strict=True):
                self._add_products(tile, each)
        return sums

    def _share(self, count: int, visit: Callable[[Expr], None]) -> None:
        width = self.threads.warps * WARP
        for first in range(0, count, width):
            i = tir.let(first + self.threads.thread)
            with tir.when(i < count):
                visit(i)

    def _fetch_x(self, step: Expr) -> None:
        """A step of the activations in f16; rows past the last are read as the last."""
        parts = STEP // 16

        def half(i: Expr) -> None:
            row, part = tir.let(i // parts), tir.let(i % parts)
            source = tir.let(tir.minimum(self.first + row, self.n - 1))
            if isinstance(self.x, Q8):
                block, side = tir.let((step * parts + part) // 2), tir.let(part % 2)
                scale = tir.let(self.x.xd[block, source, side])
                words = tir.registers(16, "int8")
                loaded = tir.load(self.x.xq, (block, source, side * 16), 16)
                tir.store(words, 0, loaded, 16)
                values = [tir.cast(words[j], "float32") * scale for j in range(16)]
            else:
                at = tir.let(step * STEP + part * 16)
                values = [self.x.x[source, at + j] for j in range(16)]
            _lay_down(self.a, row, part * 16, values)

        self._share(self.knobs.rows * parts, half)

    def _fetch_weights(self, matrix: Matrix, tile: Buffer, start: Expr, step: Expr) -> None:
        """A step of the weights in f16; rows past the last are read as the last."""
        width = lane_columns(matrix.facts)
        parts, per_row = STEP // width, matrix.k // width

        def part(i: Expr) -> None:
            row, place = tir.let(i // parts), tir.let(i % parts)
            source = tir.minimum(start + row, matrix.rows - 1)
            index = tir.let(source * per_row + step * parts + place)
            _lay_down(tile, row, place * width, floats(matrix, index))

        assert COLUMNS * 2 == STEP
        self._share(self.knobs.columns * parts, part)

    def _add_products(self, tile: Buffer, sums: Buffer) -> None:
        """The warp's part of a step: 16 columns of x at a time."""
        lane = self.threads.lane
        pairs = self.knobs.column_tiles // 2
        for step in range(0, STEP, 16):
            b = tir.registers(4 * pairs, "uint32")
            for pair in range(pairs):
                row = self.column + 16 * pair + lane // 16 * 8 + lane % 8
                tir.load_matrices(b, 4 * pair, 4, tile, [row, step + lane // 8 % 2 * 8])
            for m in range(self.knobs.row_tiles):
                a = tir.registers(4, "uint32")
                row = self.row + 16 * m + lane % 16
                tir.load_matrices(a, 0, 4, self.a, [row, step + lane // 16 * 8])
                for t in range(2 * pairs):
                    at = 4 * (m * 2 * pairs + t)
                    tir.mma_f16(sums, at, [a[i] for i in range(4)], [b[2 * t], b[2 * t + 1]])


def _lay_down(tile: Buffer, row: Expr, column: Expr, values: Sequence[Expr]) -> None:
    """Values side by side in shared memory as f16, 8 or 4 a store."""
    width = min(8, len(values))
    for first in range(0, len(values), width):
        part = tir.registers(width, "float16")
        for i in range(width):
            tir.store(part, i, tir.cast(values[first + i], "float16"))
        tir.store(tile, (row, column + first), tir.load(part, 0, width), width)
