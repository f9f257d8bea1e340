"""Attention over paged pools on the emulated GPU, against numpy in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from activations import q8a, q8a_shapes
from emu.device import InOut, Out, run
from expectations import close, close_q8a, same
from paged import Paged, decode_work, expected, paged, prefill_work

from xpuc.schedules.cuda.attention import Attention, attention_decode
from xpuc.schedules.cuda.attention_prefill import accepts, attention_prefill, tile_rows_for

SMOLLM2 = Attention(9, 3, 64, 64**-0.5)
LAYERS = [
    SMOLLM2,
    Attention(4, 1, 256, 256**-0.5, window=40),
    Attention(4, 2, 80, 0.2, softcap=4.0, block_tokens=32),
    Attention(7, 1, 16, 0.3, window=200, kv_dtype="float32"),
    Attention(8, 1, 128, 0.1, softcap=3.0, window=17, kv_dtype="float32", block_tokens=64),
    Attention(3, 1, 8, 0.5),
    replace(SMOLLM2, kv_dtype="q8_0"),
    Attention(4, 1, 256, 256**-0.5, window=40, kv_dtype="q8_0", block_tokens=32),
    Attention(7, 1, 96, 0.1, window=200, softcap=6.0, kv_dtype="q8_0", block_tokens=64),
    Attention(2, 2, 32, 0.2, kv_dtype="q8_0"),
]
each_layer = pytest.mark.parametrize("job", LAYERS, ids=lambda job: job.name)


NO_ITEM = (9_999, 0, 9_999, 9_999)  # row, no rows, sequence, segment


def decode(data: Paged, *, quantize: bool = False) -> list[Any]:
    """One tile for each row of the step; padding is the last row, and the last item of work."""
    job, n = data.job, len(data.q)
    work, tiles = decode_work(data, range(n - 1))
    work = np.concatenate([work, np.array([NO_ITEM], np.int32)])
    heads, width = job.heads, job.heads * job.head_dim
    shapes = q8a_shapes(width, n) if quantize else [((n, width), "float32")]
    arrived = np.zeros((n, job.kv_heads), np.int32)
    counters, _, _, *out = run(
        attention_decode(job, None, quantize=quantize),
        data.q, data.positions, tiles, work, data.block_table, *data.pools, InOut(arrived),
        Out((len(work), heads, job.head_dim), "float32"), Out((len(work), heads, 2), "float32"),
        *(Out(*shape) for shape in shapes),
    )  # fmt: skip
    same(counters, 0)
    return out


def prefill(data: Paged) -> Any:
    job = data.job
    work, tiles = prefill_work(data, tile_rows_for(job.heads, job.kv_heads))
    (out,) = run(
        attention_prefill(job, None),
        data.q, data.positions, tiles, work, data.block_table, *data.pools,
        Out(data.q.shape, "float32"),
    )  # fmt: skip
    return out


@each_layer
def test_decode(job: Attention) -> None:
    data = paged(job, [(1, 1), (300, 1), (128, 1), (129, 1), (17, 1)])
    (out,) = decode(data)
    close(out[:-1], expected(data)[:-1], 1e-5)
    same(out[-1], np.nan)  # of no tile, so nobody wrote it


def test_a_row_of_more_segments_than_are_merged_at_a_time() -> None:
    data = paged(Attention(1, 1, 16, 0.3, segment_tokens=64), [(64 * 65 + 1, 1)])
    (out,) = decode(data)
    close(out[:-1], expected(data)[:-1], 1e-5)


@pytest.mark.parametrize("job", [LAYERS[2], LAYERS[4], LAYERS[6]], ids=lambda job: job.name)
def test_quantised_decode(job: Attention) -> None:
    data = paged(job, [(140, 1), (20, 1)])
    (out,) = decode(data)
    close(out[:-1], expected(data)[:-1], 1e-5)
    quantised = [a[:, :-1] for a in decode(data, quantize=True)]
    for got, want in zip(quantised, q8a(out[:-1]), strict=True):
        np.testing.assert_array_equal(got, want)
    close_q8a(quantised, expected(data)[:-1])


@each_layer
def test_prefill(job: Attention) -> None:
    if not accepts(job):
        assert job.head_dim == 8
        return
    data = paged(job, [(61, 61), (150, 20), (5, 1), (256, 3)])
    out = prefill(data)
    close(out[:-1], expected(data)[:-1], 2e-3)
    same(out[-1], np.nan)


def test_large_scores_neither_overflow_nor_lose_the_small_ones() -> None:
    data = paged(SMOLLM2, [(140, 3)])
    data.q = (100 * data.q).astype(np.float16).astype(np.float32)  # as tensor cores take them
    close(decode(data)[0][:-1], expected(data)[:-1], 1e-4)
    close(prefill(data)[:-1], expected(data)[:-1], 2e-3)
