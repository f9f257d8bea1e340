"""Projections of many rows by int8 products: tiles of y = x W^T from copies of the weights.

A block of threads makes a tile of y. Codes of x and of W go to shared memory as they are, 64
columns ahead of what is multiplied, and the warps multiply them by `mma` into int32. Sums over 32
columns are exact, and so are those over 256, of the sums times the integer scales of the weight;
those are scaled in f32 and added up in the order of the columns. The minimums of 32 columns times
the sums of x over them are a product of 16 columns of f16 for each 256, exact as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.gate_up import ACTS
from xpuc.schedules.cuda.groups import blocks_of, side_by_side, when_within
from xpuc.schedules.cuda.products import Matrix, Weight
from xpuc.schedules.cuda.regroup import BLOCKS, Grouped
from xpuc.schedules.cuda.tiles import Tile, TileKnobs
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T, Threads
from xpuc.schedules.cuda.widen import GROUP, pays
from xpuc.schedules.packed import COLUMNS

STEP = 64  # columns that are fetched at a time
_CHUNK = 16  # of them that one copy takes
_PAD = 16  # bytes after a row in shared memory, so that 8 rows start in different banks
_STAGES = 2


@dataclass(frozen=True)
class Int8MatmulKnobs(TileKnobs):
    """Those of a tile, and `halves` of a step, 32 columns each, whose operands are loaded side by
    side: with both the loads of one hide behind the products of the other, with one a thread has
    registers to spare. No result depends on them.
    """

    rows: int = 128
    columns: int = 128
    row_warps: int = 2
    column_warps: int = 4
    halves: int = 2


@dataclass(frozen=True)
class Int8GroupKnobs(Int8MatmulKnobs):
    """The same of several matrices, between which a thread keeps where they are."""

    halves: int = 1


@dataclass(frozen=True)
class Int8GatedKnobs(Int8MatmulKnobs):
    """The same of a tile of h, for which a thread has sums of both matrices."""

    columns: int = 64


_DEFAULTS, _OF_GROUPS, _GATED = Int8MatmulKnobs(), Int8GroupKnobs(), Int8GatedKnobs()


@dataclass(frozen=True)
class Copied:
    """A packed matrix (rows, k) inside a kernel, and its copy: codes int8 (rows * k,)."""

    packed: Matrix
    codes: Buffer

    @property
    def rows(self) -> int:
        return self.packed.rows

    def row(self, row: Expr, tile: int) -> Expr:
        """A row of a tile of so many rows; one past the last is read as the last."""
        return row if self.rows % tile == 0 else tir.minimum(row, self.rows - 1)


def int8_matmul(
    weights: Sequence[Weight],
    k: int,
    *,
    bias: Sequence[bool] = (),
    knobs: Int8MatmulKnobs | None = None,
) -> tirx.PrimFunc:
    """y f32 (n, sum of rows) = x W^T, plus a bias for each weight that has one; any n.

    Arguments: x (`Grouped`), the planes of each weight, their copies int8 (rows * k,), the biases
    f32 (rows,), y.
    """
    knobs = knobs or (_DEFAULTS if len(weights) == 1 else _OF_GROUPS)

    def body() -> None:
        n = tir.rows_var()
        x = Grouped.declare(n, k)
        matrices = _declare(weights, k)
        parts = side_by_side(matrices, bias, knobs.columns)
        y = tir.arg("y", (n, sum(w.rows for w in weights)), "float32")
        grid = (blocks_of(parts), (n + knobs.rows - 1) // knobs.rows)
        threads = tir.launch(grid, knobs.warps)
        tile = _Tile(x, n, k, knobs, threads)
        for part in parts:
            with when_within(threads.block[0], part.first, part.count) as at:
                start = tir.let(at * knobs.columns)
                sums = tile.multiply(part.matrix, start)
                tile.each(start, part.matrix.rows, part.storing(y, sums))

    names = "_".join(f"{w.format.lower()}_{w.rows}" for w in weights)
    words = ["bias"] if any(bias) else []
    return tir.prim_func("_".join(["int8_matmul", names, f"x{k}", *words]), body)


def _declare(weights: Sequence[Weight], k: int) -> list[Copied]:
    assert all(pays(w.format) for w in weights)
    matrices = [weight.declare(f"w{i}", k) for i, weight in enumerate(weights)]
    copies = [tir.arg(f"c{i}", (w.rows * k,), "int8") for i, w in enumerate(weights)]
    return [Copied(*both) for both in zip(matrices, copies, strict=True)]


def int8_gated_matmul(
    gate: Weight, up: Weight, k: int, *, act: str, knobs: Int8MatmulKnobs = _GATED
) -> tirx.PrimFunc:
    """h f32 (n, rows) = act(x gate^T) * (x up^T), for any n.

    Arguments: x (`Grouped`), the planes of gate, then of up, their copies int8 (rows * k,), h.
    """
    assert gate.rows == up.rows

    def body() -> None:
        n = tir.rows_var()
        x = Grouped.declare(n, k)
        pair = _declare([gate, up], k)
        h = tir.arg("h", (n, gate.rows), "float32")
        grid = (-(-gate.rows // knobs.columns), (n + knobs.rows - 1) // knobs.rows)
        threads = tir.launch(grid, knobs.warps)
        tile = _Tile(x, n, k, knobs, threads)
        start = tir.let(threads.block[0] * knobs.columns)
        gates, ups = (tile.multiply(matrix, start) for matrix in pair)

        def one(row: Expr, column: Expr, i: int) -> None:
            tir.store(h, (row, column), ACTS[act](gates[i]) * ups[i])

        tile.each(start, gate.rows, one)

    shape = f"{gate.format.lower()}_{up.format.lower()}_{gate.rows}x{k}"
    return tir.prim_func(f"int8_gated_matmul_{act}_{shape}", body)


class _Tile(Tile):
    """A tile whose operands are codes."""

    def __init__(
        self, x: Grouped, n: Expr, k: int, knobs: Int8MatmulKnobs, threads: Threads
    ) -> None:
        super().__init__(n, knobs, threads)
        self.x, self.k, self.knobs = x, k, knobs
        self.row = tir.let(threads.warp // knobs.column_warps * knobs.row_tiles * 16)
        self.column = tir.let(threads.warp % knobs.column_warps * knobs.column_tiles * 8)
        self.a = tir.shared((_STAGES * knobs.rows, STEP + _PAD), "int8")
        self.b = tir.shared((_STAGES * knobs.columns, STEP + _PAD), "int8")

    def multiply(self, matrix: Copied, start: Expr) -> Buffer:
        """The products with the rows from `start` on: registers as `each` counts."""
        sums = tir.registers(self.knobs.sums, "float32")
        of_group = tir.registers(self.knobs.sums, "int32")
        for i in range(self.knobs.sums):
            tir.store(sums, i, tir.const(0.0, "float32"))
        tir.sync_block()
        self._fetch(matrix, start, tir.const(0, "int32"), 0)
        with tir.serial(0, self.k // GROUP) as group:
            factors = _Factors(self, matrix, start, group)
            for i in range(self.knobs.sums):
                tir.store(of_group, i, tir.const(0, "int32"))
            with tir.serial(0, GROUP // STEP, unroll=False) as step:
                words = factors.words(step)
                tir.wait_copies(0)
                tir.sync_block()
                following = tir.let(group * (GROUP // STEP) + step + 1)
                with tir.when(following < self.k // STEP):
                    self._fetch(matrix, start, following, (step + 1) % _STAGES)
                for half in self._halves():
                    scales = factors.integers(words, half)
                    self._add_products(of_group, scales, step % _STAGES, half)
            factors.scale(of_group, sums)
        return sums

    def _halves(self) -> Iterator[Expr]:
        """Those of a step in order, side by side or in a loop."""
        if self.knobs.halves == STEP // COLUMNS:
            yield from range(STEP // COLUMNS)
            return
        with tir.serial(0, STEP // COLUMNS, unroll=False) as half:
            yield half

    def _fetch(self, matrix: Copied, start: Expr, step: Expr, stage: Expr) -> None:
        """Start copying a step of both operands; rows past the last are read as the last."""
        knobs = self.knobs
        of_w = tir.view(matrix.codes, (matrix.rows, self.k), "int8")

        def x_row(row: Expr) -> Expr:
            return tir.minimum(self.first + row, self.n - 1)

        def w_row(row: Expr) -> Expr:
            return matrix.row(start + row, knobs.columns)

        for codes, tile, source, count in (
            (self.x.codes, self.a, x_row, knobs.rows),
            (of_w, self.b, w_row, knobs.columns),
        ):
            chunks, width = STEP // _CHUNK, self.threads.warps * WARP
            for i in range(0, count * chunks, width):
                assert count * chunks % width == 0, f"{knobs} leave threads without a chunk"
                index = tir.let(i + self.threads.thread)
                row, place = tir.let(index // chunks), tir.let(index % chunks * _CHUNK)
                at = (tir.let(source(row)), step * STEP + place)
                tir.copy_async(tile, (stage * count + row, place), codes, at)
        tir.commit_copies()

    def _add_products(
        self, of_group: Buffer, scales: Sequence[Expr], stage: Expr, half: Expr
    ) -> None:
        """The warp's part of 32 columns, times the integer scale of each, to the group's sums."""
        lane, knobs, byte = self.threads.lane, self.knobs, half * COLUMNS
        pairs = knobs.column_tiles // 2
        b = tir.registers(4 * pairs, "uint32")
        for pair in range(pairs):
            row = stage * knobs.columns + self.column + 16 * pair + lane // 16 * 8 + lane % 8
            tir.load_matrices(b, 4 * pair, 4, self.b, [row, byte + lane // 8 % 2 * 16])
        for m in range(knobs.row_tiles):
            a = tir.registers(4, "uint32")
            row = stage * knobs.rows + self.row + 16 * m + lane % 16
            tir.load_matrices(a, 0, 4, self.a, [row, byte + lane // 16 * 16])
            for t in range(knobs.column_tiles):
                found = tir.registers(4, "uint32")
                tir.mma_s8(found, 0, [a[i] for i in range(4)], [b[2 * t], b[2 * t + 1]], onto=False)
                for c in range(4):
                    at = 4 * (m * knobs.column_tiles + t) + c
                    product = tir.bits(found[c], "int32") * scales[2 * t + c % 2]
                    tir.store(of_group, at, product + of_group[at])


class _Factors:
    """What a thread multiplies its integer products of a group of columns with."""

    def __init__(self, tile: _Tile, matrix: Copied, start: Expr, group: Expr) -> None:
        self.tile, self.matrix, self.start, self.group = tile, matrix, start, group
        self.planes = matrix.packed.planes
        self.groups = tile.k // GROUP
        own = tir.let(start + tile.column + tile.threads.lane % 4 * 2)
        tiles = range(tile.knobs.column_tiles)
        self.blocks = [self._block(own + 8 * t + c) for t in tiles for c in range(2)]

    def _block(self, row: Expr) -> Expr:
        """The group's block of a row of the matrix."""
        row = self.matrix.row(row, self.tile.knobs.columns)
        return tir.let(row * self.groups + self.group)

    def words(self, step: Expr) -> list[Expr]:
        """The scales of each column for a step, a byte for each of its halves, uint32."""
        plane = self.planes["scales"]
        assert STEP == 2 * COLUMNS
        size = self.matrix.rows * self.groups * BLOCKS // 2
        pairs = tir.view(plane, (size,), "uint16")
        return [
            tir.let(tir.cast(tir.load(pairs, block * (BLOCKS // 2) + step), "uint32"))
            for block in self.blocks
        ]

    def integers(self, words: Sequence[Expr], half: Expr) -> list[Expr]:
        """Of `words` the scale of each column for a half, int32."""
        is_signed = str(self.planes["scales"].dtype) == "int8"
        kind = "int32" if is_signed else "uint32"  # the shift to the right keeps the sign
        left = tir.cast(24 - 8 * half, "uint32")
        highs = (tir.bits(T.shift_left(word, left), kind) for word in words)
        return [tir.let(tir.bits(T.shift_right(h, tir.const(24, kind)), "int32")) for h in highs]

    def scale(self, of_group: Buffer, sums: Buffer) -> None:
        """Add the group's integer sums, scaled, to those of all columns."""
        tile, has_mins = self.tile, "mins" in self.planes
        tiles = tile.knobs.column_tiles
        rows = [self._rows(i) for i in range(tile.knobs.row_tiles)]
        of_x = [[tir.let(tile.x.scale[self.group, row]) for row in pair] for pair in rows]
        x_sums = [self._x_sums(pair) for pair in rows] if has_mins else []
        for t in range(tiles):
            d = self._floats("d", t)
            m = self._floats("m", t) if has_mins else []
            mins = self._mins(t) if has_mins else None
            for i in range(tile.knobs.row_tiles):
                shifted = tir.registers(4, "float32")
                if has_mins:
                    tir.mma_f16(shifted, 0, x_sums[i], [mins, mins], onto=False)
                for c in range(4):
                    at = 4 * (i * tiles + t) + c
                    part = d[c % 2] * tir.cast(of_group[at], "float32")
                    if has_mins:
                        part = tir.fma(m[c % 2], shifted[c], part)
                    tir.store(sums, at, tir.fma(of_x[i][c // 2], part, sums[at]))

    def _rows(self, i: int) -> list[Expr]:
        """The rows of x of the thread's elements of the i-th tiles of 16 rows."""
        tile = self.tile
        first = tir.let(tile.first + tile.row + 16 * i + tile.threads.lane // 4)
        return [tir.let(tir.minimum(first + 8 * half, tile.n - 1)) for half in range(2)]

    def _floats(self, name: str, t: int) -> list[Expr]:
        """A number of the block of each of the two columns of a tile, f32."""
        plane = self.planes[name]
        blocks = self.blocks[2 * t : 2 * t + 2]
        return [tir.let(tir.cast(tir.load(plane, block), "float32")) for block in blocks]

    def _mins(self, t: int) -> Expr:
        """The thread's two of the minimums of the 8 rows of a tile, as f16."""
        lane, tile = self.tile.threads.lane, self.tile
        row = tir.let(self.start + tile.column + 8 * t + lane // 4)
        at = self._block(row) * BLOCKS + lane % 4 * 2
        pair = [tir.cast(tir.load(self.planes["mins"], at + i), "float16") for i in range(2)]
        return tir.let(tir.bits(tir.vector(pair), "uint32"))

    def _x_sums(self, rows: Sequence[Expr]) -> list[Expr]:
        """The thread's part of the sums of 16 rows of x."""
        lane = self.tile.threads.lane
        shape = (self.groups, self.tile.n, BLOCKS)
        pairs = tir.view(self.tile.x.sums, shape, "uint32")
        return [
            tir.let(pairs[self.group, row, lane % 4 + half * BLOCKS // 2])
            for half in range(2)
            for row in rows
        ]
