"""What happens to q, k and v on a GPU between their projection and attention, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T

_WARPS = 4

Load = Callable[[Expr], Expr]  # column of a head -> f32
Store = Callable[[Expr, Expr], None]  # (column of a head, f32)


@dataclass(frozen=True)
class QkPrep:
    """One layer's q and k norm, rotary embedding and K/V write.

    `pairing` is "norm" (dimensions 2i and 2i + 1 turn together) or "neox" (i and i + n_rot / 2);
    `eps` is that of the q and k norm, None where the model has none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    n_rot: int
    pairing: str
    eps: float | None = None
    kv_dtype: str = "float16"
    block_tokens: int = 16
    joined: bool = True

    def __post_init__(self) -> None:
        assert self.pairing in ("norm", "neox"), self.pairing
        assert self.n_rot % 2 == 0, f"{self.n_rot} dimensions cannot be paired"
        assert self.n_rot <= self.head_dim


@dataclass(frozen=True)
class _Operands:
    """The buffers of one call; `sources` are (buffer, first column) of q, k and v."""

    sources: tuple[tuple[Buffer, int], ...]
    table: Buffer
    slots: Buffer
    norms: tuple[Buffer, ...]
    keys: Buffer
    values: Buffer
    q: Buffer


def qk_prep(job: QkPrep, n: int | None) -> tirx.PrimFunc:
    """Norm and rotate q and k, write k and v into the pools, leave q for attention.

    Arguments: qkv f32 (n, (heads + 2 kv_heads) head_dim), or q, k and v apart unless `joined`;
    table f32 (n, n_rot); slots i32 (n,), where a negative one writes nothing; with `eps` q_norm and
    k_norm f32 (head_dim,); in place Kp (blocks, kv_heads, head_dim, block_tokens) and Vp (blocks,
    kv_heads, block_tokens, head_dim); output q f32 (n, heads head_dim).

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
            _write_kv(job, operands, (row, tir.let(task - job.heads), slot), lane)

    words = [job.pairing, *(["qknorm"] if job.eps is not None else []), job.kv_dtype]
    sizes = f"{job.heads}_{job.kv_heads}_{job.head_dim}_{job.n_rot}"
    return tir.prim_func(f"qk_prep_{sizes}_{'_'.join(words)}_r{n or 'n'}", body)


def _declare(job: QkPrep, rows: int | Expr) -> _Operands:
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
    blocks = tir.rows_var("n_blocks")
    keys = tir.arg("keys", (blocks, job.kv_heads, hd, job.block_tokens), job.kv_dtype)
    values = tir.arg("values", (blocks, job.kv_heads, job.block_tokens, hd), job.kv_dtype)
    q = tir.arg("q", (rows, q_width), "float32")
    return _Operands(sources, table, slots, norms, keys, values, q)


def _prepare_q(job: QkPrep, operands: _Operands, place: tuple[Expr, Expr], lane: Expr) -> None:
    row, head = place
    start = tir.let(head * job.head_dim)
    source = _head(job, operands, (0, row, start), lane)
    _rotate(
        job, (source, lambda c: operands.table[row, c]), lane,
        lambda c, value: tir.store(operands.q, (row, start + c), value),
    )  # fmt: skip


def _write_kv(job: QkPrep, operands: _Operands, place: tuple[Expr, Expr, Expr], lane: Expr) -> None:
    row, head, slot = place
    block, token = tir.let(slot // job.block_tokens), tir.let(slot % job.block_tokens)
    start = tir.let(head * job.head_dim)

    def store_key(c: Expr, value: Expr) -> None:
        tir.store(operands.keys, (block, head, c, token), tir.cast(value, job.kv_dtype))

    def copy_value(c: Expr) -> None:
        value = tir.cast(v[row, first + start + c], job.kv_dtype)
        tir.store(operands.values, (block, head, token, c), value)

    source = _head(job, operands, (1, row, start), lane)
    _rotate(job, (source, lambda c: operands.table[row, c]), lane, store_key)
    v, first = operands.sources[2]
    _share(job.head_dim, lane, copy_value)


def _head(job: QkPrep, operands: _Operands, which: tuple[int, Expr, Expr], lane: Expr) -> Load:
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

    _share(job.head_dim, lane, add_square)
    total = tir.warp_reduce(squares[0], "sum")
    mean = tir.fma(total, tir.const(1.0 / job.head_dim, "float32"), tir.const(job.eps, "float32"))
    inverse = tir.let(tir.const(1.0, "float32") / T.sqrt(mean))
    return lambda c: plain(c) * inverse * operands.norms[index][c]


def _rotate(job: QkPrep, sources: tuple[Load, Load], lane: Expr, target: Store) -> None:
    """Turn the first n_rot columns of a head by the table, copy the others."""
    source, table = sources
    half = job.n_rot // 2

    def turn(i: Expr) -> None:
        columns = (2 * i, 2 * i + 1) if job.pairing == "norm" else (i, i + half)
        x, y = (tir.let(source(c)) for c in columns)
        cos, sin = tir.let(table(i)), tir.let(table(half + i))
        target(columns[0], tir.fma(x, cos, tir.const(0.0, "float32") - y * sin))
        target(columns[1], tir.fma(y, cos, x * sin))

    _share(half, lane, turn)
    _share(job.head_dim - job.n_rot, lane, lambda i: target(job.n_rot + i, source(job.n_rot + i)))


def _share(count: int, lane: Expr, visit: Callable[[Expr], None]) -> None:
    """`visit` each of `count` numbers, the lanes of a warp in turn."""
    for first in range(0, count, WARP):
        number = tir.let(lane + first)
        with tir.when(number < count):
            visit(number)
