"""RMS norm at a block boundary: the residual addition before it, the quantisation after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK
from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.quantize import Q8a, emit_block, q8a_args
from xpuc.schedules.llvm.tir import Buffer, Expr, T


@dataclass(frozen=True)
class _Boundary:
    """What one boundary does, and its buffers; those it has no use for are None."""

    d: int
    eps: float
    lanes: int
    x: Buffer
    delta: Buffer | None
    w_post: Buffer | None
    w: Buffer | None
    h: Buffer | None
    y: Buffer | Q8a | None


def rms_norm(
    d: int,
    n: int | None,
    eps: float,
    *,
    residual: bool = False,
    post_norm: bool = False,
    quantize: bool = False,
    lanes: int = 8,
) -> tirx.PrimFunc:
    """y = rms(h) * w, where h = x, or x + delta, or with `post_norm` x + rms(delta) * w_post.

    Arguments: x f32 (n, d); with `residual` delta f32 (n, d); with `post_norm` w_post f32 (d,);
    w f32 (d,); outputs h f32 (n, d) with `residual`, then y f32 (n, d), or its q8a with `quantize`.
    """
    parts = [
        "rms",
        f"{d}",
        *_words(residual, post_norm),
        *(["q8"] if quantize else []),
        f"r{n or 'n'}",
    ]
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = tir.arg("x", (rows, d), "float32")
        delta = tir.arg("delta", (rows, d), "float32") if residual else None
        w_post = tir.arg("w_post", (d,), "float32") if post_norm else None
        w = tir.arg("w", (d,), "float32")
        h = tir.arg("h", (rows, d), "float32") if residual else None
        y = q8a_args(d, rows) if quantize else tir.arg("y", (rows, d), "float32")
        _emit(_Boundary(d, eps, lanes, x, delta, w_post, w, h, y), rows)

    return tir.prim_func("_".join(parts), body)


def residual_add(
    d: int, n: int | None, eps: float, *, post_norm: bool = False, lanes: int = 8
) -> tirx.PrimFunc:
    """The boundary without a norm after it: h = x + delta, or x + rms(delta) * w_post.

    Arguments: x f32 (n, d), delta f32 (n, d), with `post_norm` w_post f32 (d,); output h f32
    (n, d).
    """
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = tir.arg("x", (rows, d), "float32")
        delta = tir.arg("delta", (rows, d), "float32")
        w_post = tir.arg("w_post", (d,), "float32") if post_norm else None
        h = tir.arg("h", (rows, d), "float32")
        _emit(_Boundary(d, eps, lanes, x, delta, w_post, None, h, None), rows)

    return tir.prim_func("_".join([*_words(True, post_norm), f"{d}", f"r{n or 'n'}"]), body)


def _words(residual: bool, post_norm: bool) -> list[str]:
    return (["add"] if residual else []) + (["post"] if post_norm else [])


def _emit(job: _Boundary, rows: int | Expr) -> None:
    assert job.d % job.lanes == 0, f"{job.d} columns are not whole vectors of {job.lanes}"
    assert (job.delta is None) == (job.h is None)
    with tir.each_row(rows, job.d) as row:
        stream = job.x if job.h is None else job.h
        if job.h is not None:
            _add(job, row)
        if job.w is not None:
            _norm(job, stream, row)


def _add(job: _Boundary, row: Expr) -> None:
    """h of one row."""
    post = job.w_post
    inverse = None
    if post is not None:
        inverse = inverse_rms(
            lambda c: tir.load(job.delta, (row, c), job.lanes), job.d, job.eps, job.lanes
        )
    with tir.serial(0, job.d // job.lanes) as step:
        c = step * job.lanes
        x, delta = (tir.load(b, (row, c), job.lanes) for b in (job.x, job.delta))
        if post is None:
            h = x + delta
        else:
            scaled = delta * tir.splat(inverse, job.lanes)
            h = tir.fma(scaled, tir.load(post, c, job.lanes), x, job.lanes)
        tir.store(job.h, (row, c), h, job.lanes)


def _norm(job: _Boundary, stream: Buffer, row: Expr) -> None:
    """y of one row."""
    inverse = inverse_rms(
        lambda c: tir.load(stream, (row, c), job.lanes), job.d, job.eps, job.lanes
    )

    def normed(c: Expr) -> Expr:
        scaled = tir.load(stream, (row, c), job.lanes) * tir.splat(inverse, job.lanes)
        return scaled * tir.load(job.w, c, job.lanes)

    if isinstance(job.y, Q8a):
        with tir.serial(0, job.d // Q8_BLOCK) as block:
            starts = [block * Q8_BLOCK + i for i in range(0, Q8_BLOCK, job.lanes)]
            emit_block([normed(c) for c in starts], job.y, block, row, job.lanes)
        return
    with tir.serial(0, job.d // job.lanes) as step:
        c = step * job.lanes
        tir.store(job.y, (row, c), normed(c), job.lanes)


def inverse_rms(vector: Callable[[Expr], Expr], d: int, eps: float, lanes: int) -> Expr:
    """1 / sqrt(mean of squares + eps) of `d` values; `vector(c)` loads `lanes` from column c.

    Summed in up to four vectors, so that the additions of one do not wait for each other.
    """
    streams = 4 if d % (4 * lanes) == 0 else 1
    sums = tir.scratch(streams * lanes, "float32")
    for i in range(streams):
        tir.store(sums, i * lanes, tir.const(0.0, "float32", lanes), lanes)
    with tir.serial(0, d // (streams * lanes)) as step:
        for i in range(streams):
            value = tir.let(vector((step * streams + i) * lanes))
            so_far = tir.load(sums, i * lanes, lanes)
            tir.store(sums, i * lanes, tir.fma(value, value, so_far, lanes), lanes)
    total = tir.tree_sum([tir.load(sums, i * lanes, lanes) for i in range(streams)])
    total = tir.fold_float(total, lanes, tir.add)
    mean = tir.fma(total, tir.const(1.0 / d, "float32"), tir.const(eps, "float32"))
    return tir.let(tir.const(1.0, "float32") / T.sqrt(mean))
