"""Attention over paged pools against numpy in double precision; decode and prefill bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from activations import q8a_shapes
from kernel_calls import build, call
from paged import Paged, decode_work, expected, paged, prefill_work

from xpuc.schedules.llvm.attention import attention_reduce, attention_split
from xpuc.schedules.llvm.attention_core import Attention, AttentionKnobs
from xpuc.schedules.llvm.attention_prefill import attention_prefill, tile_rows_for
from xpuc.schedules.llvm.quantize import quantize

DEFAULTS = AttentionKnobs()
SMOLLM2 = Attention(9, 3, 64, 64**-0.5)
GEMMA3 = Attention(4, 1, 256, 256**-0.5, window=40)
LAYERS = [
    SMOLLM2,
    GEMMA3,
    Attention(2, 2, 80, 0.2, softcap=4.0, block_tokens=32),
    Attention(7, 1, 16, 0.3, window=200, kv_dtype="float32"),
    Attention(16, 2, 32, 0.2, softcap=3.0, window=17, kv_dtype="float32", block_tokens=64),
    Attention(3, 1, 8, 0.5),
    *(
        replace(job, kv_dtype="q8_0")
        for job in (
            SMOLLM2,
            GEMMA3,
            Attention(5, 5, 32, 0.2, softcap=4.0, block_tokens=32),
            Attention(8, 2, 128, 0.1, window=200, softcap=6.0),
            Attention(4, 4, 96, 0.1, block_tokens=128),
        )
    ),
]
Q8_0 = LAYERS[6:]


def described(job: Attention) -> str:
    return job.name


@cache
def built(kernel: Callable[..., Any], *args: Any) -> Callable[..., None]:
    """Compiled once for all tests."""
    return build(kernel(*args))


def reduce_to_q8(job: Attention, n: int | None) -> Any:
    return attention_reduce(job, n, quantize=True)


def decode(
    data: Paged,
    rows: list[int] | None = None,
    *,
    static: bool = False,
    q8: bool = False,
    knobs: AttentionKnobs = DEFAULTS,
) -> list[Any]:
    """One tile for each row of the step (or for `rows`, of a step that holds only them)."""
    job, n = data.job, len(data.q)
    step = range(n - 1) if rows is None else rows
    q = data.q if rows is None else data.q[rows]
    positions = data.positions if rows is None else data.positions[rows]
    work, tiles = decode_work(data, step)
    n, w = len(q), len(work)
    split = built(attention_split, job, n if static else None, knobs)
    acc, ml = call(
        split,
        [q, positions, work, data.block_table, *data.pools],
        [((w, job.heads, job.head_dim), "float32"), ((w, job.heads, 2), "float32")],
    )
    reduce = built(reduce_to_q8 if q8 else attention_reduce, job, n if static else None)
    width = job.heads * job.head_dim
    shapes = [((n, width), "float32")]
    if q8:
        shapes = q8a_shapes(width, n)
    return call(reduce, [acc, ml, tiles], shapes)


def prefill(
    data: Paged,
    tile_rows: int | None = None,
    static: bool = False,
    knobs: AttentionKnobs = DEFAULTS,
) -> Any:
    job, n = data.job, len(data.q)
    most = tile_rows or tile_rows_for(job.heads, job.kv_heads, job.head_dim)
    work, tiles = prefill_work(data, most)
    inputs = [data.q, data.positions, tiles, work, data.block_table, *data.pools]
    kernel = built(attention_prefill, job, n if static else None, tile_rows, knobs)
    (out,) = call(kernel, inputs, [(data.q.shape, "float32")])
    return out


@pytest.mark.parametrize("job", LAYERS, ids=described)
def test_decode(job: Attention) -> None:
    data = paged(job, [(1, 1), (300, 1), (128, 1), (129, 1), (17, 1)])
    (out,) = decode(data)
    np.testing.assert_allclose(out, expected(data), rtol=0, atol=4e-6)
    assert not out[-1].any()


@pytest.mark.parametrize("job", LAYERS, ids=described)
def test_prefill_equals_decode_bit_for_bit(job: Attention) -> None:
    data = paged(job, [(61, 61), (290, 37), (5, 1), (256, 30)])
    out = prefill(data)
    np.testing.assert_allclose(out, expected(data), rtol=0, atol=4e-6)
    assert not out[-1].any()
    np.testing.assert_array_equal(out, decode(data)[0])


@pytest.mark.parametrize("job", [SMOLLM2, LAYERS[3]], ids=described)
def test_the_size_of_tiles_changes_no_bit(job: Attention) -> None:
    data = paged(job, [(61, 61), (290, 37), (5, 1)])
    np.testing.assert_array_equal(prefill(data, tile_rows=5, static=True), prefill(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        AttentionKnobs(chains=1, fetch_keys=False, fetch_values=False, fetch_next=0),
        AttentionKnobs(chains=24, fetch_next=1 << 20, tile_queries=4),
    ],
)
@pytest.mark.parametrize("job", [*LAYERS[:4], *Q8_0[:3]], ids=described)
def test_knobs_change_no_bit(job: Attention, knobs: AttentionKnobs) -> None:
    data = paged(job, [(1, 1), (300, 9), (129, 1)])
    np.testing.assert_array_equal(decode(data, knobs=knobs)[0], decode(data)[0])
    np.testing.assert_array_equal(prefill(data, knobs=knobs), prefill(data))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize("job", [SMOLLM2, Q8_0[0]], ids=described)
def test_other_vector_widths(job: Attention, lanes: int) -> None:
    data = paged(replace(job, lanes=lanes, window=150, softcap=5.0), [(200, 20), (130, 1)])
    (out,) = decode(data)
    np.testing.assert_allclose(out, expected(data), rtol=0, atol=4e-6)
    np.testing.assert_array_equal(out, prefill(data))


def test_one_row_alone_equals_the_row_in_a_batch() -> None:
    data = paged(SMOLLM2, [(300, 1), (700, 1), (40, 1)])
    (together,) = decode(data)
    (alone,) = decode(data, [1], static=True)
    np.testing.assert_array_equal(alone[0], together[1])


@pytest.mark.parametrize("job", [SMOLLM2, LAYERS[2], LAYERS[4]], ids=described)
@pytest.mark.parametrize("static", [False, True])
def test_quantised_reduce_equals_quantise_after_reduce(job: Attention, static: bool) -> None:
    data = paged(job, [(140, 1), (20, 1)])
    (out,) = decode(data, static=static)
    got = decode(data, static=static, q8=True)
    shapes = [(a.shape, str(a.dtype)) for a in got]
    want = call(build(quantize(out.shape[1], None)), [out], shapes)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_window_as_long_as_the_context_changes_nothing() -> None:
    data = paged(SMOLLM2, [(200, 9)])
    wide = replace(data, job=replace(SMOLLM2, window=200))
    np.testing.assert_array_equal(prefill(wide), prefill(data))
    narrow = replace(data, job=replace(SMOLLM2, window=199))
    differs = (prefill(narrow) != prefill(data)).any(1)
    assert differs[8]
    assert not differs[:8].any()


def test_large_scores_neither_overflow_nor_lose_the_small_ones() -> None:
    data = paged(SMOLLM2, [(300, 3)])
    data.q *= 300
    np.testing.assert_allclose(prefill(data), expected(data), rtol=0, atol=2e-4)
    np.testing.assert_array_equal(prefill(data), decode(data)[0])


@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(9, 3, 16), (4, 1, 12), (96, 1, 1)])
def test_a_tile_holds_about_48_queries(heads: int, kv_heads: int, rows: int) -> None:
    assert tile_rows_for(heads, kv_heads, 64) == rows
