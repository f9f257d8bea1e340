"""Sequences in a paged K/V pool, attention over them in numpy, and the index arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kv_pools
import numpy as np

from xpuc.schedules.attention_job import AttentionJob

NOWHERE = (-1, 9_999)  # what entries of a block table are that name no block


@dataclass
class Paged:
    """Sequences in shuffled blocks of a pool whose other slots hold NaN; their last rows are asked.

    Blocks that no asked row sees are in no pool: a block table names none at their places.
    The rows of sequence i are rows[i][0] to rows[i][1] of the step; one padded row comes last.
    """

    job: AttentionJob
    q: Any
    positions: Any
    rows: list[tuple[int, int]]
    contexts: list[tuple[Any, Any]]
    block_table: Any
    pools: list[Any]


def paged(job: AttentionJob, sequences: list[tuple[int, int]], seed: int = 0) -> Paged:
    """`sequences` are (tokens, rows asked)."""
    rng = np.random.default_rng(seed)
    bt, kvh, hd = job.block_tokens, job.kv_heads, job.head_dim
    blocks = [-(-tokens // bt) for tokens, _ in sequences]
    free = iter(rng.permutation(sum(blocks) + 3))
    table = np.resize(np.array(NOWHERE, np.int32), (len(sequences), max(blocks) + 3))
    dtype = job.kv_dtype
    pools = kv_pools.filled(sum(blocks) + 3, kvh, hd, dtype=dtype, block_tokens=bt, filler=np.nan)
    contexts, rows, positions, start = [], [], [], 0
    for i, (tokens, asked) in enumerate(sequences):
        k, v = rng.standard_normal((2, tokens, kvh, hd)).astype(np.float32)
        low = max(0, tokens - asked - job.window + 1) if job.window else 0
        for t in range(low // bt * bt, tokens):
            if t % bt == 0:
                table[i, t // bt] = next(free)
            kv_pools.write(pools, dtype, (table[i, t // bt], t % bt), k[t], v[t])
        contexts.append((kv_pools.kept(dtype, k), kv_pools.kept(dtype, v)))
        rows.append((start, start + asked))
        positions += range(tokens - asked, tokens)
        start += asked
    q = rng.standard_normal((start + 1, job.heads * hd), np.float32) * 2
    return Paged(job, q, np.array([*positions, 0], np.int32), rows, contexts, table, pools)


def expected(data: Paged) -> Any:
    job = data.job
    out = np.zeros((len(data.q), job.heads, job.head_dim))
    for (first, last), (k, v) in zip(data.rows, data.contexts, strict=True):
        for row in range(first, last):
            position = data.positions[row]
            seen = slice(max(0, position - job.window + 1) if job.window else 0, position + 1)
            for head in range(job.heads):
                query = data.q[row].reshape(job.heads, job.head_dim)[head].astype(np.float64)
                kv = head // job.group
                s = k[seen, kv].astype(np.float64) @ query * job.scale
                if job.softcap:
                    s = job.softcap * np.tanh(s / job.softcap)
                p = np.exp(s - s.max())
                out[row, head] = p @ v[seen, kv].astype(np.float64) / p.sum()
    return out.reshape(len(data.q), -1)


def decode_work(data: Paged, step: Sequence[int]) -> tuple[Any, Any]:
    """work and tiles of a call of these rows, a tile each: all segments, seen or not."""
    job = data.job
    work, tiles = [], []
    for i, row in enumerate(step):
        seq = next(s for s, (a, b) in enumerate(data.rows) if a <= row < b)
        segments = range(data.positions[row] // job.segment_tokens + 1)
        tiles.append((i, 1, len(work), len(segments)))
        work += [(i, 1, seq, segment) for segment in segments]
    return np.array(work, np.int32), np.array(tiles, np.int32)


def prefill_work(data: Paged, tile_rows: int) -> tuple[Any, Any]:
    """work and tiles of a call of all rows, in tiles of at most `tile_rows`."""
    work = [
        (row, min(tile_rows, last - row), seq, 0)
        for seq, (first, last) in enumerate(data.rows)
        for row in range(first, last, tile_rows)
    ]
    tiles = [(row, n_rows, i, 1) for i, (row, n_rows, _, _) in enumerate(work)]
    return np.array(work, np.int32), np.array(tiles, np.int32)
