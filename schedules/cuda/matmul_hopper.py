"""Projections of many rows on the tensor cores of sm_90a: y = x W^T by products of warpgroups.

The weights are the first factor, decoded in registers (weight_factors.py). The activations are the
second, widened to f16 by a kernel of their own (activation_rows.py): one thread has TMA copy
tiles of them to a ring in shared memory, steps ahead of the warpgroups that multiply. While the
tensor cores multiply, the lanes decode the weights of the next step, and before that their packed
bytes are on their way.

Both factors are rounded to f16, as in matmul.py: results differ from those of single rows by some
1e-3 of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from xpuc.schedules.cuda import hopper, tir
from xpuc.schedules.cuda.activation_rows import widened_columns
from xpuc.schedules.cuda.gate_up import ACTS
from xpuc.schedules.cuda.groups import blocks_of, side_by_side, when_within
from xpuc.schedules.cuda.products import Matrix, Weight
from xpuc.schedules.cuda.tir import Buffer, Expr
from xpuc.schedules.cuda.weight_factors import PARTS, STEP, Share
from xpuc.schedules.packed import COLUMNS, packed


@dataclass(frozen=True)
class HopperKnobs:
    """How a tile of y is made. No result depends on it.

    `rows` of x a tile, a multiple of 8 up to 256; `warpgroups`, each for 64 rows of the weight (of
    both, if gated); `stages` steps of x that are on their way or multiplied; `parts` of 16
    columns, of the 8 of a step, that are decoded and then multiplied; `resident` blocks that a
    multiprocessor has registers for.
    """

    rows: int = 128
    warpgroups: int = 2
    stages: int = 4
    parts: int = 4
    resident: int = 1

    @property
    def columns(self) -> int:
        """Of a tile of y: rows of the weight."""
        return self.warpgroups * hopper.ROWS

    @property
    def warps(self) -> int:
        """Warps of a block; each multiplies."""
        return self.warpgroups * hopper.WARPGROUP


_DEFAULTS = HopperKnobs()
# Of a gated product: weights of 16 bits take registers that the sums of more rows would need.
_ROWS_BESIDE_WIDE_WEIGHTS = 96


def accepts(k: int) -> bool:
    """Whether a row is whole sub-blocks."""
    return k % COLUMNS == 0


def matmul(
    weights: Sequence[Weight],
    k: int,
    *,
    bias: Sequence[bool] = (),
    knobs: HopperKnobs = _DEFAULTS,
) -> tirx.PrimFunc:
    """y f32 (n, sum of rows) = x W^T, plus a bias for each weight that has one; any n.

    Arguments: the widened activation of n rows, the planes of each weight, the biases f32 (rows,),
    y.
    """

    def body() -> None:
        n = tir.rows_var()
        x = tir.arg("x", (n, widened_columns(k)), "float16")
        matrices = [weight.declare(f"w{i}", k) for i, weight in enumerate(weights)]
        parts = side_by_side(matrices, bias, knobs.columns)
        y = tir.arg("y", (n, sum(w.rows for w in weights)), "float32")
        tile = _Tile(x, blocks_of(parts), knobs)
        for part in parts:
            with when_within(tile.threads.block[0], part.first, part.count) as at:
                start = tir.let(at * knobs.columns)
                (sums,) = tile.multiply([part.matrix], start)
                tile.each(start, part.matrix.rows, part.storing(y, sums))

    names = "_".join(f"{w.format.lower()}_{w.rows}" for w in weights)
    words = ["bias"] if any(bias) else []
    return tir.prim_func("_".join(["hopper_matmul", names, f"x{k}", *words]), body)


def gated_matmul(
    gate: Weight, up: Weight, k: int, *, act: str, knobs: HopperKnobs = _DEFAULTS
) -> tirx.PrimFunc:
    """h f32 (n, rows) = act(x gate^T) * (x up^T), for any n.

    Arguments: the widened activation of n rows, the planes of gate, then of up, h.
    """
    assert gate.rows == up.rows
    if any(packed(w.format).columns == 1 for w in (gate, up)):
        knobs = replace(knobs, rows=min(knobs.rows, _ROWS_BESIDE_WIDE_WEIGHTS))

    def body() -> None:
        n = tir.rows_var()
        x = tir.arg("x", (n, widened_columns(k)), "float16")
        pair = gate.declare("gate", k), up.declare("up", k)
        h = tir.arg("h", (n, gate.rows), "float32")
        blocks = -(-gate.rows // knobs.columns)
        tile = _Tile(x, blocks, knobs)
        with when_within(tile.threads.block[0], 0, blocks) as at:
            start = tir.let(at * knobs.columns)
            gates, ups = tile.multiply(pair, start)

            def one(row: Expr, column: Expr, i: int) -> None:
                tir.store(h, (row, column), ACTS[act](gates[i]) * ups[i])

            tile.each(start, gate.rows, one)

    shape = f"{gate.format.lower()}_{up.format.lower()}_{gate.rows}x{k}"
    return tir.prim_func(f"hopper_gated_matmul_{act}_{shape}", body)


class _Tile:
    """A block of threads before its tile of y."""

    def __init__(self, x: Buffer, blocks: int, knobs: HopperKnobs) -> None:
        self.n, width = x.shape
        self.steps, self.knobs = int(width) // STEP, knobs
        source = hopper.tensor_map(x, knobs.rows)
        grid = (blocks, (self.n + knobs.rows - 1) // knobs.rows)
        self.threads = tir.launch(grid, knobs.warps)
        tir.reside(knobs.resident)
        self.first = tir.let(self.threads.block[1] * knobs.rows)
        self.ring = hopper.Ring(
            self.threads, source, tiles=STEP // hopper.COLUMNS, stages=knobs.stages,
        )  # fmt: skip
        for step in range(min(knobs.stages, self.steps)):
            self._fill(step)

    def _fill(self, step: Expr) -> None:
        with tir.when(self.threads.thread == 0):
            self.ring.fill(step, self.first, step * STEP)

    def multiply(self, matrices: Sequence[Matrix], start: Expr) -> list[Buffer]:
        """The products with the rows of each matrix from `start` on: registers as `each` counts."""
        own = tir.let(start + self.threads.warp // hopper.WARPGROUP * hopper.ROWS)
        shares = [Share(matrix, own, self.threads) for matrix in matrices]
        size = self.knobs.rows // 2
        sums = [tir.registers(size, "float32") for _ in matrices]
        for each in sums:
            for i in range(size):
                tir.store(each, i, tir.const(0.0, "float32"))
        tiles = self.ring.descriptor()
        for share in shares:
            share.load(0)
        shares[0].decode()
        with tir.serial(0, self.steps) as step:
            self.ring.wait(step)
            for i, (share, each) in enumerate(zip(shares, sums, strict=True)):
                for first in range(0, PARTS, self.knobs.parts):
                    parts = range(first, first + self.knobs.parts)
                    hopper.multiply_add(
                        each,
                        [(share.operand(p), self.ring.operand(tiles, step, p)) for p in parts],
                    )
                    if first == 0:
                        share.load(step + 1)
                    if first == i == 0:
                        self._refill(step)
                    if first + self.knobs.parts == PARTS:
                        shares[(i + 1) % len(shares)].decode()
                    hopper.wait_products(each)
            self.ring.release(step)
        return sums

    def _refill(self, step: Expr) -> None:
        """Have the stage of the step before filled again, which all are done with or soon are."""
        after = tir.let(step + self.knobs.stages - 1)
        with tir.when(tirx.And(step > 0, after < self.steps)):
            self._fill(after)

    def each(self, start: Expr, end: int, visit: Callable[[Expr, Expr, int], None]) -> None:
        """`visit(row of y, row of the matrix, register)` for all that this thread has made."""
        own = tir.let(start + self.threads.warp // hopper.WARPGROUP * hopper.ROWS)
        for half in range(2):
            column = tir.let(own + hopper.position(self.threads, 2 * half)[0])
            with tir.when(column < end):
                for i in range(self.knobs.rows // 2):
                    if i // 2 % 2 == half:
                        row = tir.let(self.first + hopper.position(self.threads, i)[1])
                        with tir.when(row < self.n):
                            visit(row, column, i)
