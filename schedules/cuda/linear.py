"""Projections of a few activations: y = x W^T of one or several packed matrices side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.cuda import tir
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


@dataclass(frozen=True)
class _Part:
    """One of the matrices: blocks from `first` on are its, columns of y from `column` on."""

    matrix: Matrix
    bias: Buffer | None
    first: int
    column: int


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
    biases = tuple(bias) or (False,) * len(weights)

    def body() -> None:
        all_rows = tir.rows_var() if n is None else n
        x = ACTIVATIONS[activation].declare(all_rows, k)
        parts = _declare(weights, k, biases, knobs)
        y = tir.arg("y", (all_rows, sum(w.rows for w in weights)), "float32")
        blocks = parts[-1].first + -(-parts[-1].matrix.rows // knobs.block_rows)
        threads, rows = open_threads(blocks, all_rows, knobs.warps)
        for part, end in zip(parts, [*(p.first for p in parts[1:]), blocks], strict=True):
            here = tirx.And(threads.block[0] >= part.first, threads.block[0] < end)
            with tir.when(here):
                _multiply(part, x, rows, threads, y, knobs)

    names = "_".join(f"{w.format.lower()}_{w.rows}" for w in weights)
    words = [*(["bias"] if any(biases) else []), *(["f32"] if activation == "f32" else [])]
    return tir.prim_func("_".join(["linear", names, f"x{k}", *words, f"r{n or 'n'}"]), body)


def open_threads(blocks: int, n: int | Expr, warps: int) -> tuple[Threads, Rows]:
    """Threads of `blocks` blocks for each tile of activations, and the tile of this one's."""
    if isinstance(n, int):
        return tir.launch((blocks,), warps), Rows(n, n)
    threads = tir.launch((blocks, (n + TILE - 1) // TILE), warps)
    return threads, Rows(n, TILE, tir.let(threads.block[1] * TILE))


def _declare(
    weights: Sequence[Weight], k: int, biases: Sequence[bool], knobs: LinearKnobs
) -> list[_Part]:
    matrices = [weight.declare(f"w{i}", k) for i, weight in enumerate(weights)]
    vectors = [
        tir.arg(f"b{i}", (weight.rows,), "float32") if has else None
        for i, (weight, has) in enumerate(zip(weights, biases, strict=True))
    ]
    parts, first, column = [], 0, 0
    for matrix, vector in zip(matrices, vectors, strict=True):
        parts.append(_Part(matrix, vector, first, column))
        first += -(-matrix.rows // knobs.block_rows)
        column += matrix.rows
    return parts


def _multiply(
    part: _Part, x: Activation, rows: Rows, threads: Threads, y: Buffer, knobs: LinearKnobs
) -> None:
    """The rows of this warp."""
    start = tir.let((threads.block[0] - part.first) * knobs.block_rows + threads.warp * knobs.rows)
    streams = [Stream(part.matrix, start + i) for i in range(knobs.rows)]
    sums = row_sums(streams, x, rows, threads.lane, knobs.ahead)
    with tir.when(threads.lane == 0):
        for stream, of_row in zip(streams, sums, strict=True):
            with tir.when(stream.row < part.matrix.rows):
                for c, value in enumerate(of_row):
                    total = value if part.bias is None else value + part.bias[stream.row]
                    with rows.when_there(c) as row:
                        tir.store(y, (row, part.column + stream.row), total)
