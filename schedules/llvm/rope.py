"""Rotary position embedding: the table of a step, and the preparation of its q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tvm import tirx

from xpuc.schedules.attention_job import QkPrepJob
from xpuc.schedules.llvm import pools, tir
from xpuc.schedules.llvm.norm import inverse_rms
from xpuc.schedules.llvm.pools import Load, Place, Pool, Store
from xpuc.schedules.llvm.tir import Buffer, Expr, T


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
        scale = tir.const(mscale, "float64")
        with tir.each_row(rows, 64 * n_rot) as row, tir.serial(0, half) as i:
            position = tir.cast(positions[row], "float64")
            angle = tir.let(position * inv_freq[i])
            tir.store(table, (row, i), tir.cast(T.cos(angle) * scale, "float32"), 1)
            tir.store(table, (row, half + i), tir.cast(T.sin(angle) * scale, "float32"), 1)

    return tir.prim_func(f"rope_table_{n_rot}_r{n or 'n'}", body)


@dataclass(frozen=True)
class QkPrep(QkPrepJob):
    """The preparation of q, k and v on a core whose vectors are of `lanes` f32."""

    lanes: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        pools.check(self)


@dataclass(frozen=True)
class _Step:
    """The buffers of one call; `sources` are (buffer, first column) of q, k and v."""

    sources: tuple[tuple[Buffer, int], ...]
    table: Buffer
    slots: Buffer
    norms: tuple[Buffer, ...]
    pool: Pool
    q: Buffer


def qk_prep(job: QkPrep, n: int | None) -> tirx.PrimFunc:
    """Norm and rotate q and k, write k and v into the pools, leave q for attention.

    Arguments: qkv f32 (n, (heads + 2 kv_heads) head_dim), or q, k and v apart unless `joined`;
    table f32 (n, n_rot); slots i32 (n,), where a negative one writes nothing; with `eps` q_norm and
    k_norm f32 (head_dim,); in place the arrays of the pool; output q f32 (n, heads head_dim).
    """
    rows = _rows(n)
    width = (job.heads + 2 * job.kv_heads) * job.head_dim

    def body() -> None:
        step = _declare(job, rows)
        with tir.each_row(rows, 2 * width) as row:
            _prepare_q(job, step, row)
            slot = tir.let(step.slots[row])
            with tir.when(slot >= 0):
                _write_kv(job, step, row, slot)

    return tir.prim_func(f"qk_prep_{job.name}_r{n or 'n'}", body)


def _rows(n: int | None) -> int | Expr:
    return tir.rows_var() if n is None else n


def _declare(job: QkPrep, rows: int | Expr) -> _Step:
    hd, q_width, kv_width = job.head_dim, job.heads * job.head_dim, job.kv_heads * job.head_dim
    if job.joined:
        qkv = tir.arg("qkv", (rows, q_width + 2 * kv_width), "float32")
        sources = ((qkv, 0), (qkv, q_width), (qkv, q_width + kv_width))
    else:
        widths = (("q_in", q_width), ("k_in", kv_width), ("v_in", kv_width))
        q_in, k_in, v_in = (tir.arg(name, (rows, width), "float32") for name, width in widths)
        sources = ((q_in, 0), (k_in, 0), (v_in, 0))
    table = tir.arg("table", (rows, job.n_rot), "float32")
    slots = tir.arg("slots", (rows,), "int32")
    names = ("q_norm", "k_norm") if job.eps is not None else ()
    norms = tuple(tir.arg(name, (hd,), "float32") for name in names)
    pool = pools.declare(job)
    q = tir.arg("q", (rows, q_width), "float32")
    return _Step(sources, table, slots, norms, pool, q)


def _prepare_q(job: QkPrep, step: _Step, row: Expr) -> None:
    with tir.serial(0, job.heads) as head:
        start = tir.let(head * job.head_dim)
        source = _head(job, step, 0, row, start)
        _rotate(
            job,
            source,
            lambda c, lanes: tir.load(step.table, (row, c), lanes),
            lambda c, value, lanes: tir.store(step.q, (row, start + c), value, lanes),
        )


def _write_kv(job: QkPrep, step: _Step, row: Expr, slot: Expr) -> None:
    block = tir.let(tir.cast(slot // job.block_tokens, "int64"))
    token = tir.let(slot % job.block_tokens)
    with tir.serial(0, job.kv_heads) as head:
        start = tir.let(head * job.head_dim)
        place = Place(block, head, token)
        step.pool.write_key(place, partial(_rotate_key, job, step, row, start))
        step.pool.write_value(place, partial(_load_value, step, row, start))


def _rotate_key(job: QkPrep, step: _Step, row: Expr, start: Expr, store: Store) -> None:
    _rotate(
        job,
        _head(job, step, 1, row, start),
        lambda c, lanes: tir.load(step.table, (row, c), lanes),
        store,
    )


def _load_value(step: _Step, row: Expr, start: Expr, c: Expr, lanes: int) -> Expr:
    v, first = step.sources[2]
    return tir.load(v, (row, first + start + c), lanes)


def _head(job: QkPrep, step: _Step, which: int, row: Expr, start: Expr) -> Load:
    """The columns of one head of q (0) or k (1), normed where the model norms them."""
    buffer, first = step.sources[which]

    def plain(c: Expr, lanes: int) -> Expr:
        return tir.load(buffer, (row, first + start + c), lanes)

    if job.eps is None:
        return plain
    lanes = job.lanes
    inverse = inverse_rms(lambda c: plain(c, lanes), job.head_dim, job.eps, lanes)

    def normed(c: Expr, lanes: int) -> Expr:
        return plain(c, lanes) * tir.splat(inverse, lanes) * tir.load(step.norms[which], c, lanes)

    return normed


def _rotate(job: QkPrep, source: Load, table: Load, target: Store) -> None:
    """Turn the first n_rot columns of a head, copy the others."""
    half = job.n_rot // 2
    lanes = job.lanes if half % job.lanes == 0 else 1
    adjacent = job.pairing == "norm"
    with tir.serial(0, half // lanes) as step:
        c = tir.let(step * lanes)
        columns = (2 * c, 2 * c + lanes) if adjacent else (c, c + half)
        pair = [tir.let(source(column, lanes)) for column in columns]
        if adjacent and lanes > 1:
            pair = _shuffled(pair, [[*range(i, 2 * lanes, 2)] for i in (0, 1)])
        cos, sin = tir.let(table(c, lanes)), tir.let(table(half + c, lanes))
        zero = tir.const(0.0, "float32", lanes)
        turned = [
            tir.fma(pair[0], cos, zero - pair[1] * sin, lanes),
            tir.fma(pair[1], cos, pair[0] * sin, lanes),
        ]
        if adjacent and lanes > 1:
            order = [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]
            turned = _shuffled(turned, [order[:lanes], order[lanes:]])
        for column, value in zip(columns, turned, strict=True):
            target(column, value, lanes)
    rest = job.head_dim - job.n_rot
    if rest == 0:
        return
    lanes = job.lanes if rest % job.lanes == 0 else 1
    with tir.serial(0, rest // lanes) as step:
        c = tir.let(job.n_rot + step * lanes)
        target(c, source(c, lanes), lanes)


def _shuffled(pair: list[Expr], orders: list[list[int]]) -> list[Expr]:
    pair = [tir.let(v) for v in pair]
    return [tir.let(T.Shuffle(pair, order)) for order in orders]
