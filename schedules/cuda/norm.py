"""RMS norm at a block boundary on a GPU: the residual addition before it, the quantisation after.

A block of threads takes a row and keeps it in registers: warp w has the columns of blocks w,
w + warps, ... of 32, a lane one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.quantize import Q8a
from xpuc.schedules.cuda.tir import Buffer, Expr, T, Threads

_STEPS = 8  # blocks of columns that a warp takes, if the row is long enough
_MOST_WARPS = 32


def rms_norm(
    d: int,
    n: int | None,
    eps: float,
    *,
    residual: bool = False,
    post_norm: bool = False,
    quantize: bool = False,
) -> tirx.PrimFunc:
    """y = rms(h) * w, where h = x, or x + delta, or with `post_norm` x + rms(delta) * w_post.

    Arguments: x f32 (n, d); with `residual` delta f32 (n, d); with `post_norm` w_post f32 (d,);
    w f32 (d,); outputs h f32 (n, d) with `residual`, then y f32 (n, d), or its q8a with `quantize`.
    """
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = tir.arg("x", (rows, d), "float32")
        delta = tir.arg("delta", (rows, d), "float32") if residual else None
        w_post = tir.arg("w_post", (d,), "float32") if post_norm else None
        w = tir.arg("w", (d,), "float32")
        h = tir.arg("h", (rows, d), "float32") if residual else None
        y = Q8a.declare(d, rows) if quantize else tir.arg("y", (rows, d), "float32")
        row = _Row.open(rows, d, eps)
        values = row.read(x)
        if delta is not None:
            row.add(values, delta, w_post)
            row.each(lambda i, c: tir.store(h, (row.number, c), values[i]))
        row.norm(values, w)
        row.write(values, y)

    words = [*(["add"] if residual else []), *(["post"] if post_norm else [])]
    words += ["q8"] if quantize else []
    return tir.prim_func("_".join(["rms", f"{d}", *words, f"r{n or 'n'}"]), body)


@dataclass(frozen=True)
class _Row:
    """A row of d columns in the registers of a block of threads."""

    threads: Threads
    d: int
    eps: float

    @staticmethod
    def open(rows: int | Expr, d: int, eps: float) -> _Row:
        """Threads for `rows` rows."""
        warps = 1
        while warps < _MOST_WARPS and warps * _STEPS * Q8_BLOCK < d:
            warps *= 2
        return _Row(tir.launch((rows,), warps), d, eps)

    @property
    def number(self) -> Expr:
        return self.threads.block[0]

    @property
    def _steps(self) -> int:
        return -(-self.d // (self.threads.warps * Q8_BLOCK))

    def each(self, visit: Callable[[int, Expr], None]) -> None:
        """`visit(i, column)` for each register i that holds a column."""
        for i in range(self._steps):
            column = tir.let(self._block(i) * Q8_BLOCK + self.threads.lane)
            with tir.when(column < self.d):
                visit(i, column)

    def _block(self, i: int) -> Expr:
        return i * self.threads.warps + self.threads.warp

    def read(self, source: Buffer) -> Buffer:
        """A row of (n, d), zeros past its end."""
        values = tir.registers(self._steps, "float32")
        for i in range(self._steps):
            tir.store(values, i, tir.const(0.0, "float32"))
        self.each(lambda i, c: tir.store(values, i, tir.load(source, (self.number, c))))
        return values

    def add(self, values: Buffer, delta: Buffer, w_post: Buffer | None) -> None:
        """values += delta, or its norm times w_post."""
        added = self.read(delta)
        if w_post is None:
            self.each(lambda i, c: tir.store(values, i, values[i] + added[i]))
            return
        inverse = self._inverse_rms(added)

        def one(i: int, c: Expr) -> None:
            scaled = added[i] * inverse
            tir.store(values, i, tir.fma(scaled, tir.load(w_post, c), values[i]))

        self.each(one)

    def norm(self, values: Buffer, w: Buffer) -> None:
        """values = rms(values) * w."""
        inverse = self._inverse_rms(values)
        self.each(lambda i, c: tir.store(values, i, values[i] * inverse * tir.load(w, c)))

    def _inverse_rms(self, values: Buffer) -> Expr:
        total: Expr = tir.const(0.0, "float32")
        for i in range(self._steps):
            total = tir.let(tir.fma(values[i], values[i], total))
        total = tir.block_reduce(self.threads, total, "sum")
        mean = tir.fma(total, tir.const(1.0 / self.d, "float32"), tir.const(self.eps, "float32"))
        return tir.let(tir.const(1.0, "float32") / T.sqrt(mean))

    def write(self, values: Buffer, y: Buffer | Q8a) -> None:
        """The row of y."""
        if not isinstance(y, Q8a):
            self.each(lambda i, c: tir.store(y, (self.number, c), values[i]))
            return
        for i in range(self._steps):
            block = tir.let(self._block(i))
            with tir.when(block < self.d // Q8_BLOCK):
                y.store_block(values[i], block, self.number, self.threads.lane)
