"""Kernels of a GPU that give every element a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import WARP, Expr, T

_WARPS = 4


@contextmanager
def each(rows: int | Expr, columns: int) -> Iterator[tuple[Expr, Expr]]:
    """Inside, a thread's (row, column)."""
    width = _WARPS * WARP
    threads = tir.launch((-(-columns // width), rows), _WARPS)
    column = tir.let(threads.block[0] * width + threads.thread)
    with tir.when(column < columns):
        yield threads.block[1], column


def take_rows(d: int, n: int | None, m: int | None) -> tirx.PrimFunc:
    """x f32 (n, d), rows i32 (m,) -> f32 (m, d), row i of which is row rows[i] of x."""
    source, wanted = _rows(n), _rows(m, "m")

    def body() -> None:
        x = tir.arg("x", (source, d), "float32")
        rows = tir.arg("rows", (wanted,), "int32")
        out = tir.arg("out", (wanted, d), "float32")
        with each(wanted, d) as (i, c):
            tir.store(out, (i, c), tir.load(x, (rows[i], c)))

    return tir.prim_func(f"take_rows_{d}_r{m or 'n'}", body)


def residual_add(d: int, n: int | None) -> tirx.PrimFunc:
    """x f32 (n, d), delta f32 (n, d) -> x + delta."""
    rows = _rows(n)

    def body() -> None:
        x, delta, h = (tir.arg(name, (rows, d), "float32") for name in ("x", "delta", "h"))
        with each(rows, d) as at:
            tir.store(h, at, tir.load(x, at) + tir.load(delta, at))

    return tir.prim_func(f"add_{d}_r{n or 'n'}", body)


def softcap(v: int, m: int | None, cap: float) -> tirx.PrimFunc:
    """x f32 (m, v) -> cap * tanh(x / cap)."""

    def capped(x: Expr) -> Expr:
        return T.tanh(x * tir.const(1.0 / cap, "float32")) * tir.const(cap, "float32")

    return _of_one("softcap", v, m, capped)


def _of_one(name: str, d: int, n: int | None, value: Callable[[Expr], Expr]) -> tirx.PrimFunc:
    rows = _rows(n)

    def body() -> None:
        x, y = (tir.arg(name, (rows, d), "float32") for name in ("x", "y"))
        with each(rows, d) as at:
            tir.store(y, at, value(tir.load(x, at)))

    return tir.prim_func(f"{name}_{d}_r{n or 'n'}", body)


def zeros(d: int, n: int | None, dtype: str) -> tirx.PrimFunc:
    """y (n, d) of a dtype."""
    rows = _rows(n)

    def body() -> None:
        y = tir.arg("y", (rows, d), dtype)
        with each(rows, d) as at:
            tir.store(y, at, tir.const(0, dtype))

    return tir.prim_func(f"zeros_{d}_{dtype}_r{n or 'n'}", body)


def rope_table(n_rot: int, n: int | None, mscale: float = 1.0) -> tirx.PrimFunc:
    """The cosines and sines of a step, times `mscale`.

    Arguments: positions i32 (n,), inv_freq f64 (n_rot / 2,); output table f32 (n, n_rot), the
    cosines of a row in its first half, the sines in its second. Angles are taken in double
    precision: at position 100 000 an f32 angle is wrong in the third digit.
    """
    rows, half = _rows(n), n_rot // 2

    def body() -> None:
        positions = tir.arg("positions", (rows,), "int32")
        inv_freq = tir.arg("inv_freq", (half,), "float64")
        table = tir.arg("table", (rows, n_rot), "float32")
        with each(rows, half) as (row, i):
            angle = tir.let(tir.cast(positions[row], "float64") * inv_freq[i])
            for start, turn in ((0, T.cos), (half, T.sin)):
                value = turn(angle) * tir.const(mscale, "float64")
                tir.store(table, (row, start + i), tir.cast(value, "float32"))

    return tir.prim_func(f"rope_table_{n_rot}_r{n or 'n'}", body)


def _rows(n: int | None, name: str = "n") -> int | Expr:
    return tir.rows_var(name) if n is None else n
