"""Causal attention over the paged K/V pool, as the formula says it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx

from xpuc.artifact import KV_GROUP, pool_arrays
from xpuc.codegen.kernels.definition import Expr, Tensor, f32, full_name, kernel, size

_HIDDEN = -3.4028234663852886e38  # below every score


def attention(
    heads: int,
    n_kv_heads: int,
    head_dim: int,
    n: int | None,
    *,
    n_blocks: int | None,
    block_tokens: int,
    kv_dtype: str,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tirx.PrimFunc:
    """q f32 (n, heads * head_dim), the pool, positions i32 (n,), tiles i32 (t, 4), work i32 (w, 4),
    block_table i32 (s, b) -> y of q's shape; a row that is in no tile gives zeros.

    A row sees its sequence's tokens at positions 0 to its own, with a `window` the last `window` of
    them. `softcap` c > 0 bends scores to c * tanh(score / c). Query head h reads K/V head
    h // (heads / n_kv_heads). The pool is that of kv_write. Memory: two f32 (n, heads, b *
    block_tokens).
    """
    rows, blocks = size(n, "n"), size(n_blocks, "n_blocks")
    q = te.placeholder((rows, heads * head_dim), "float32", "q")
    arrays = [
        te.placeholder((blocks, *a.shape), a.dtype, a.name)
        for a in pool_arrays(kv_dtype, block_tokens, n_kv_heads, head_dim)
    ]
    read_key, read_value = _readers(arrays)
    positions = te.placeholder((rows,), "int32", "positions")
    tiles = te.placeholder((size(None, "t"), 4), "int32", "tiles")
    work = te.placeholder((size(None, "w"), 4), "int32", "work")
    block_table = te.placeholder((size(None, "s"), size(None, "b")), "int32", "block_table")

    sequence = _sequence_of(rows, tiles, work)
    context = block_table.shape[1] * block_tokens
    group = heads // n_kv_heads
    e = te.reduce_axis((0, head_dim), "e")
    c = te.reduce_axis((0, context), "c")

    def sees(r: Expr, c: Expr) -> Expr:
        causal = te.all(sequence[r] >= 0, c <= positions[r])
        return te.all(causal, c > positions[r] - window) if window else causal

    def key(r: Expr, h: Expr, c: Expr) -> Expr:
        block = block_table[sequence[r], c // block_tokens]
        return read_key(block, h // group, e, c % block_tokens)

    def value(r: Expr, h: Expr, c: Expr, e: Expr) -> Expr:
        block = block_table[sequence[r], c // block_tokens]
        return read_value(block, h // group, c % block_tokens, e)

    # What a row does not see is not read: there block_table need not name a block.
    dot = te.compute(
        (rows, heads, context),
        lambda r, h, c: te.sum(
            te.if_then_else(sees(r, c), q[r, h * head_dim + e] * key(r, h, c), f32(0)), axis=e
        ),
        "dot",
    )
    share, total = _softmax(dot, _score_of(scale, softcap), sees)
    mixed = te.compute(
        q.shape,
        lambda r, j: te.sum(
            te.if_then_else(
                sees(r, c),
                share[r, j // head_dim, c] * value(r, j // head_dim, c, j % head_dim),
                f32(0),
            ),
            axis=c,
        ),
        "mixed",
    )
    y = te.compute(
        q.shape,
        lambda r, j: te.if_then_else(
            sequence[r] >= 0, mixed[r, j] / total[r, j // head_dim], f32(0)
        ),
        "y",
    )
    pool = f"{n_blocks or 'b'}x{block_tokens}"
    facts = (
        f"{heads}x{n_kv_heads}x{head_dim}",
        pool,
        kv_dtype,
        float(scale),
        window,
        float(softcap),
    )
    return kernel(
        full_name("attention", n, *facts), q, *arrays, positions, tiles, work, block_table, y
    )


def _readers(arrays: Sequence[Tensor]) -> tuple[Callable[..., Expr], Callable[..., Expr]]:
    """What reads an element of the keys, and of the values, in f32."""

    def plain(array: Tensor) -> Callable[..., Expr]:
        return lambda *index: tirx.Cast("float32", array[index])

    if len(arrays) == 2:
        return plain(arrays[0]), plain(arrays[1])
    keys, key_scales, values, value_scales = map(plain, arrays)
    return (
        lambda b, h, d, t: keys(b, h, d, t) * key_scales(b, h, d // KV_GROUP, t),
        lambda b, h, t, d: values(b, h, t, d) * value_scales(b, h, d // KV_GROUP, t),
    )


def _sequence_of(rows: Expr, tiles: Tensor, work: Tensor) -> Tensor:
    """The row of block_table that each row of q belongs to, i32 (n,); -1 or less: none."""
    t = te.reduce_axis((0, tiles.shape[0]), "t")

    def sequence(r: Expr) -> Expr:
        inside = te.all(tiles[t, 0] <= r, r < tiles[t, 0] + tiles[t, 1])
        none = tirx.const(-1, "int32")
        return te.max(te.if_then_else(inside, work[tiles[t, 2], 2], none), axis=t)

    return te.compute((rows,), sequence, "sequence")


def _score_of(scale: float, softcap: float) -> Callable[[Expr], Expr]:
    if not softcap:
        return lambda dot: dot * f32(scale)
    return lambda dot: f32(softcap) * te.tanh(dot * f32(scale) / f32(softcap))


def _softmax(
    dot: Tensor, score: Callable[[Expr], Expr], sees: Callable[[Expr, Expr], Expr]
) -> tuple[Tensor, Tensor]:
    """The shares before division (n, heads, context), and what to divide by (n, heads)."""
    rows, heads, context = dot.shape
    c = te.reduce_axis((0, context), "c")
    top = te.compute(
        (rows, heads),
        lambda r, h: te.max(te.if_then_else(sees(r, c), score(dot[r, h, c]), f32(_HIDDEN)), axis=c),
        "top",
    )
    share = te.compute(
        dot.shape,
        lambda r, h, c: te.if_then_else(
            sees(r, c), te.exp(score(dot[r, h, c]) - top[r, h]), f32(0)
        ),
        "share",
    )
    c = te.reduce_axis((0, context), "c")
    return share, te.compute((rows, heads), lambda r, h: te.sum(share[r, h, c], axis=c), "total")
