"""What happens to q, k and v on a GPU between their projection and attention, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.attention_job import QkPrepJob
from xpuc.schedules.cuda import pools, tir
from xpuc.schedules.cuda.pools import Load, Place, Pool, Store, share
from xpuc.schedules.cuda.tir import Buffer, Expr, T, Threads

_WARPS = 4


@dataclass(frozen=True)
class _Operands:
    """The buffers of one call; `sources` are (buffer, first column) of q, k and v."""

    sources: tuple[tuple[Buffer, int], ...]
    table: Buffer
    slots: Buffer
    norms: tuple[Buffer, ...]
    pool: Pool
    q: Buffer


def qk_prep(job: QkPrepJob, n: int | None) -> tirx.PrimFunc:
    """Norm and rotate q and k, write k and v into the pools, leave q for attention.

    Arguments: qkv f32 (n, (heads + 2 kv_heads) head_dim), or q, k and v apart unless `joined`;
    table f32 (n, n_rot); slots i32 (n,), where a negative one writes nothing; with `eps` q_norm and
    k_norm f32 (head_dim,); in place the arrays of the pool; output q f32 (n, heads head_dim).

    A warp takes a head of q, or a head of k and v.
    """
    rows = tir.rows_var() if n is None else n
    tasks = job.heads + job.kv_heads

    def body() -> None:
        operands = _declare(job, rows)
        threads = tir.launch((-(-tasks // _WARPS), rows), _WARPS)
        row, lane = threads.block[1], threads.lane
        task = tir.let(threads.block[0] * _WARPS + threads.warp)
        with tir.when(task < job.heads):
            _prepare_q(job, operands, (row, task), lane)
        slot = tir.let(operands.slots[row])
        is_key = tirx.And(task >= job.heads, task < tasks)
        with tir.when(tirx.And(is_key, slot >= 0)):
            _write_kv(job, operands, (row, tir.let(task - job.heads), slot), threads)

    return tir.prim_func(f"qk_prep_{job.name}_r{n or 'n'}", body)


def _declare(job: QkPrepJob, rows: int | Expr) -> _Operands:
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
    return _Operands(sources, table, slots, norms, pool, q)


def _prepare_q(job: QkPrepJob, operands: _Operands, place: tuple[Expr, Expr], lane: Expr) -> None:
    row, head = place
    start = tir.let(head * job.head_dim)
    source = _head(job, operands, (0, row, start), lane)
    _rotate(
        job, (source, lambda c: operands.table[row, c]), lane,
        lambda c, value: tir.store(operands.q, (row, start + c), value),
    )  # fmt: skip


def _write_kv(
    job: QkPrepJob, operands: _Operands, place: tuple[Expr, Expr, Expr], threads: Threads
) -> None:
    row, head, slot = place
    block, token = tir.let(slot // job.block_tokens), tir.let(slot % job.block_tokens)
    at = Place(block, head, token)
    start = tir.let(head * job.head_dim)

    def rotate(store: Store) -> None:
        source = _head(job, operands, (1, row, start), threads.lane)
        _rotate(job, (source, lambda c: operands.table[row, c]), threads.lane, store)

    v, first = operands.sources[2]
    operands.pool.write_key(at, threads, rotate)
    operands.pool.write_value(at, threads, lambda c: v[row, first + start + c])


def _head(job: QkPrepJob, operands: _Operands, which: tuple[int, Expr, Expr], lane: Expr) -> Load:
    """The columns of one head of q (0) or k (1), normed where the model norms them."""
    index, row, start = which
    buffer, first = operands.sources[index]

    def plain(c: Expr) -> Expr:
        return buffer[row, first + start + c]

    if job.eps is None:
        return plain
    squares = tir.registers(1, "float32")
    tir.store(squares, 0, tir.const(0.0, "float32"))

    def add_square(c: Expr) -> None:
        value = tir.let(plain(c))
        tir.store(squares, 0, tir.fma(value, value, squares[0]))

    share(job.head_dim, lane, add_square)
    total = tir.warp_reduce(squares[0], "sum")
    mean = tir.fma(total, tir.const(1.0 / job.head_dim, "float32"), tir.const(job.eps, "float32"))
    inverse = tir.let(tir.const(1.0, "float32") / T.sqrt(mean))
    return lambda c: plain(c) * inverse * operands.norms[index][c]


def _rotate(job: QkPrepJob, sources: tuple[Load, Load], lane: Expr, target: Store) -> None:
    """Turn the first n_rot columns of a head by the table, copy the others."""
    source, table = sources
    half = job.n_rot // 2

    def turn(i: Expr) -> None:
        columns = (2 * i, 2 * i + 1) if job.pairing == "norm" else (i, i + half)
        x, y = (tir.let(source(c)) for c in columns)
        cos, sin = tir.let(table(i)), tir.let(table(half + i))
        target(columns[0], tir.fma(x, cos, tir.const(0.0, "float32") - y * sin))
        target(columns[1], tir.fma(y, cos, x * sin))

    share(half, lane, turn)
    share(job.head_dim - job.n_rot, lane, lambda i: target(job.n_rot + i, source(job.n_rot + i)))
