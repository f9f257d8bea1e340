"""Time attention over a model's worth of cold pools: `python tests/bench/attention.py [rounds]`.

Decode is held against the speed at which this machine reads memory, prefill against its arithmetic.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "2")

import click
import numpy as np
import tvm

from xpuc.artifact import pool_arrays
from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.attention import attention_reduce, attention_split
from xpuc.schedules.llvm.attention_core import Attention
from xpuc.schedules.llvm.attention_prefill import attention_prefill, tile_rows_for

SMOLLM2 = (Attention(9, 3, 64, 64**-0.5), 30)
GEMMA3 = (Attention(4, 1, 256, 256**-0.5, window=512), 18)
LLAMA_8B = (Attention(32, 8, 128, 128**-0.5), 4)


def build(func: Any) -> Callable[..., None]:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "znver1", "num-cores": 2})
    kernel: Callable[..., None] = tvm.compile(func, target=target)[func.attrs["global_symbol"]]
    return kernel


def seconds(run: Callable[[], None], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def pools(job: Attention, context: int) -> tuple[list[Any], Any, int]:
    """The arrays of a pool, the table of the one sequence in it, and bytes of a token.

    The blocks are in random order.
    """
    rng = np.random.default_rng(0)
    blocks = -(-context // job.block_tokens)
    arrays = pool_arrays(job.kv_dtype, job.block_tokens, job.kv_heads, job.head_dim)
    made = [
        tvm.runtime.tensor(rng.uniform(-1, 1, (blocks, *a.shape)).astype(a.dtype)) for a in arrays
    ]
    table = tvm.runtime.tensor(rng.permutation(blocks).astype(np.int32)[None])
    return made, table, sum(a.block_bytes for a in arrays) // job.block_tokens


def index(*rows: tuple[int, ...]) -> Any:
    return tvm.runtime.tensor(np.array(rows, np.int32))


def zeros(*shape: int) -> Any:
    return tvm.runtime.tensor(np.zeros(shape, np.float32))


def decode(job: Attention, layers: int, context: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of all layers' split and reduce, and bytes of keys and values they read."""
    layer = [pools(job, context) for _ in range(layers)]
    start = max(0, context - job.window) if job.window else 0
    segments = range(start // job.segment_tokens, -(-context // job.segment_tokens))
    work = index(*[(0, 1, 0, s) for s in segments])
    tiles, position = (
        index((0, 1, 0, len(segments))),
        tvm.runtime.tensor(np.array([context - 1], "i4")),
    )
    width = job.heads * job.head_dim
    q = tvm.runtime.tensor(np.random.default_rng(1).standard_normal((1, width), np.float32))
    acc, ml, o = (
        zeros(len(segments), job.heads, job.head_dim),
        zeros(len(segments), job.heads, 2),
        zeros(1, width),
    )
    split, reduce = build(attention_split(job, 1)), build(attention_reduce(job, 1))

    def run_split() -> None:
        for arrays, table, _ in layer:
            split(q, position, work, table, *arrays, acc, ml)

    def run_reduce() -> None:
        for _ in layer:
            reduce(acc, ml, tiles, o)

    read = (context - start) * sum(token_bytes for *_, token_bytes in layer)
    return seconds(run_split, rounds), seconds(run_reduce, rounds), read


def prefill(job: Attention, past: int, rows: int, rounds: int) -> tuple[float, float]:
    """Seconds of one layer, and the arithmetic that the rows' contexts need."""
    context = past + rows
    arrays, table, _ = pools(job, context)
    most = tile_rows_for(job.heads, job.kv_heads, job.head_dim)
    tiles = index(*[(r, min(most, rows - r), 0, 1) for r in range(0, rows, most)])
    work = index((0, 1, 0, 0))  # prefill reads no more of it than the sequence
    width = job.heads * job.head_dim
    positions = tvm.runtime.tensor(np.arange(past, context, dtype=np.int32))
    q = tvm.runtime.tensor(np.random.default_rng(1).standard_normal((rows, width), np.float32))
    o, kernel = zeros(rows, width), build(attention_prefill(job, None))
    seen = [min(p + 1, job.window or p + 1) for p in range(past, context)]
    time_taken = seconds(lambda: kernel(q, positions, tiles, work, table, *arrays, o), rounds)
    return time_taken, 4 * sum(seen) * job.heads * job.head_dim


def read_speed(rounds: int) -> float:
    """Bytes a second of reading 64 MiB with every thread."""
    size, parts = 1 << 24, 64

    def body() -> None:
        x = tir.arg("x", (size,), "float32")
        out = tir.arg("out", (parts, 8), "float32")
        with tir.parallel(0, parts) as part:
            sums = tir.scratch(64, "float32")
            for i in range(8):
                tir.store(sums, 8 * i, tir.const(0.0, "float32", 8), 8)
            with tir.serial(0, size // parts // 64) as step:
                for i in range(8):
                    at = part * (size // parts) + step * 64 + 8 * i
                    tir.store(sums, 8 * i, tir.load(sums, 8 * i, 8) + tir.load(x, at, 8), 8)
            total = tir.tree_sum([tir.load(sums, 8 * i, 8) for i in range(8)])
            tir.store(out, (part, 0), total, 8)

    x, out, kernel = zeros(size), zeros(parts, 8), build(tir.prim_func("read", body))
    return 4 * size / seconds(lambda: kernel(x, out), rounds)


def main(rounds: int) -> None:
    roof = read_speed(rounds)
    click.echo(f"read {roof / 1e9:.1f} GB/s")
    for (job, layers), contexts in (
        (SMOLLM2, (128, 1024, 4096)),
        ((replace(SMOLLM2[0], kv_dtype="q8_0"), SMOLLM2[1]), (128, 1024, 4096)),
        (GEMMA3, (128, 1024)),
        (LLAMA_8B, (1024,)),
        ((replace(LLAMA_8B[0], kv_dtype="q8_0"), LLAMA_8B[1]), (1024,)),
    ):
        for context in contexts:
            split, reduce, size = decode(job, layers, context, rounds)
            click.echo(
                f"decode  {job.name:28} {context:5}  {split / layers * 1e6:7.1f} us  "
                f"{size / split / 1e9:5.1f} GB/s {size / split / roof:4.0%}"
                f"  reduce {reduce / layers * 1e6:5.1f} us"
            )
    for job, past, rows in (
        (SMOLLM2[0], 0, 512), (SMOLLM2[0], 1024, 512), (GEMMA3[0], 0, 512), (GEMMA3[0], 1024, 512),
        (replace(GEMMA3[0], window=None), 0, 512), (LLAMA_8B[0], 0, 512),
        (replace(SMOLLM2[0], kv_dtype="q8_0"), 1024, 512),
    ):  # fmt: skip
        taken, work = prefill(job, past, rows, rounds)
        click.echo(
            f"prefill {job.name:28} {past:5}+{rows} {taken * 1e3:6.2f} ms  "
            f"{work / taken / 1e9:5.1f} GFLOP/s"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
