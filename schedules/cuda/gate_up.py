"""The gated half of a feed-forward block on a GPU: h = act(x Wg^T) * (x Wu^T).

A block of threads takes 32 rows of both matrices, which are a block of h's columns: its warps leave
what they made in shared memory, from where h is written, quantised if wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.linear import LinearKnobs, open_threads
from xpuc.schedules.cuda.products import ACTIVATIONS, Rows, Stream, Weight, row_sums
from xpuc.schedules.cuda.quantize import Q8a
from xpuc.schedules.cuda.tir import Buffer, Expr, T, Threads

_DEFAULTS = LinearKnobs(warps=8)


def gate_up(
    gate: Weight,
    up: Weight,
    k: int,
    n: int | None,
    *,
    activation: str,
    act: str,
    quantize: bool,
    knobs: LinearKnobs = _DEFAULTS,
) -> tirx.PrimFunc:
    """h = act(x gate^T) * (x up^T), with `quantize` as q8a (then rows are whole blocks of 32).

    Arguments: the activation of n rows (`q8`: xq, xd, xs, xt; `f32`: x), the planes of gate, then
    of up; output h f32 (n, rows), or its q8a. `n` None takes any number, 8 at a time.
    """
    assert gate.rows == up.rows
    assert Q8_BLOCK % knobs.block_rows == 0, f"{knobs} do not divide {Q8_BLOCK} rows"

    def body() -> None:
        all_rows = tir.rows_var() if n is None else n
        x = ACTIVATIONS[activation].declare(all_rows, k)
        pair = gate.declare("gate", k), up.declare("up", k)
        h: Buffer | Q8a
        if quantize:
            h = Q8a.declare(gate.rows, all_rows)
        else:
            h = tir.arg("h", (all_rows, gate.rows), "float32")
        threads, rows = open_threads(-(-gate.rows // Q8_BLOCK), all_rows, knobs.warps)
        made = tir.shared((rows.count, Q8_BLOCK), "float32")
        for first in range(0, Q8_BLOCK, knobs.block_rows):
            place = tir.let(first + threads.warp * knobs.rows)
            row = tir.let(threads.block[0] * Q8_BLOCK + place)
            streams = [Stream(m, row + i) for m in pair for i in range(knobs.rows)]
            sums = row_sums(streams, x, rows, threads.lane, knobs.ahead)
            with tir.when(threads.lane == 0):
                for i in range(knobs.rows):
                    for c, (g, u) in enumerate(zip(sums[i], sums[knobs.rows + i], strict=True)):
                        tir.store(made, (c, place + i), ACTS[act](g) * u)
        tir.sync_block()
        _write(h, made, gate.rows, rows, threads)

    words = ["gate_up", act, *(["q8"] if quantize else []), *(["f32"] * (activation == "f32"))]
    shape = f"{gate.format.lower()}_{up.format.lower()}_{gate.rows}x{k}"
    return tir.prim_func("_".join([*words, shape, f"r{n or 'n'}"]), body)


def _write(h: Buffer | Q8a, made: Buffer, width: int, rows: Rows, threads: Threads) -> None:
    """A warp for each activation."""
    block = threads.block[0]
    for first in range(0, rows.count, threads.warps):
        c = tir.let(first + threads.warp)
        row = tir.let(rows.first + c)
        with tir.when(tirx.And(c < rows.count, row < rows.n)):
            value = tir.let(tir.load(made, (c, threads.lane)))
            if isinstance(h, Q8a):
                h.store_block(value, block, row, threads.lane)
            else:
                column = tir.let(block * Q8_BLOCK + threads.lane)
                with tir.when(column < width):
                    tir.store(h, (row, column), value)


def silu(x: Expr) -> Expr:
    """x * sigmoid(x)."""
    one = tir.const(1.0, "float32")
    return x / (one + T.exp(tir.const(0.0, "float32") - x))


def gelu_tanh(x: Expr) -> Expr:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""

    def c(value: float) -> Expr:
        return tir.const(value, "float32")

    inner = c(math.sqrt(2 / math.pi)) * x * tir.fma(c(0.044715) * x, x, c(1.0))
    return c(0.5) * x * (c(1.0) + T.tanh(inner))


ACTS: dict[str, Callable[[Expr], Expr]] = {"silu": silu, "gelu_tanh": gelu_tanh}
