"""Projections of a few activations: y = x W^T of one or several packed matrices side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.groups import Part, blocks_of, side_by_side, when_within
from xpuc.schedules.cuda.products import (
    ACTIVATIONS,
    TILE,
    Activation,
    Matrix,
    Rows,
    Stream,
    Weight,
    row_sums,
)
from xpuc.schedules.cuda.tir import Buffer, Expr, Threads


@dataclass(frozen=True)
class LinearKnobs:
    """How a projection uses the GPU. No result depends on it.

    `warps` of a block; `rows` of the matrix that a warp multiplies side by side, so that they share
    what they read of the activations; `ahead`, sub-blocks of each that a lane asks for before it
    uses the first: what a multiprocessor has in flight hides the latency of its memory.
    """

    warps: int = 4
    rows: int = 2
    ahead: int = 1

    @property
    def block_rows(self) -> int:
        """Rows of the matrix that a block multiplies."""
        return self.warps * self.rows


_DEFAULTS = LinearKnobs()


def linear(
    weights: Sequence[Weight],
    k: int,
    n: int | None,
    *,
    activation: str,
    bias: Sequence[bool] = (),
    knobs: LinearKnobs = _DEFAULTS,
) -> tirx.PrimFunc:
    """y f32 (n, sum of rows) = x W^T, plus a bias for each weight that has one.

    Arguments: the activation of n rows (`q8`: xq, xd, xs, xt; `f32`: x), the planes of each weight,
    the biases f32 (rows,), y. `n` None takes any number, 8 at a time.
    """

    def body() -> None:
        all_rows = tir.rows_var() if n is None else n
        x = ACTIVATIONS[activation].declare(all_rows, k)
        matrices = [weight.declare(f"w{i}", k) for i, weight in enumerate(weights)]
        parts = side_by_side(matrices, bias, knobs.block_rows)
        y = tir.arg("y", (all_rows, sum(w.rows for w in weights)), "float32")
        threads, rows = open_threads(blocks_of(parts), all_rows, knobs.warps)
        for part in parts:
            with when_within(threads.block[0], part.first, part.count) as at:
                start = tir.let(at * knobs.block_rows + threads.warp * knobs.rows)
                _multiply(part, start, x, rows, threads, y, knobs)

    names = "_".join(f"{w.format.lower()}_{w.rows}" for w in weights)
    words = [*(["bias"] if any(bias) else []), *(["f32"] if activation == "f32" else [])]
    return tir.prim_func("_".join(["linear", names, f"x{k}", *words, f"r{n or 'n'}"]), body)


def open_threads(blocks: int, n: int | Expr, warps: int) -> tuple[Threads, Rows]:
    """Threads of `blocks` blocks for each tile of activations, and the tile of this one's."""
    if isinstance(n, int):
        return tir.launch((blocks,), warps), Rows(n, n)
    threads = tir.launch((blocks, (n + TILE - 1) // TILE), warps)
    return threads, Rows(n, TILE, tir.let(threads.block[1] * TILE))


def _multiply(
    part: Part[Matrix], start: Expr, x: Activation, rows: Rows, threads: Threads, y: Buffer,
    knobs: LinearKnobs,
) -> None:  # fmt: skip
    """The rows of this warp, from `start` on."""
    streams = [Stream(part.matrix, start + i) for i in range(knobs.rows)]
    sums = row_sums(streams, x, rows, threads.lane, knobs.ahead)
    with tir.when(threads.lane == 0):
        for stream, of_row in zip(streams, sums, strict=True):
            with tir.when(stream.row < part.matrix.rows):
                for c, value in enumerate(of_row):
                    total = value if part.bias is None else value + part.bias[stream.row]
                    with rows.when_there(c) as row:
                        tir.store(y, (row, part.column + stream.row), total)
