"""What the preparation of q, k and v is given, and its result in double precision."""

from __future__ import annotations

from typing import Any

import kv_pools
import numpy as np
from expectations import close, same

from xpuc.schedules.attention_job import QkPrepJob

EPS = 1e-6
FILLER = 0.01  # what the pools hold before a call: little, for differences are relative


def table_of(positions: Any, n_rot: int) -> Any:
    inv_freq = 10000.0 ** (-np.arange(0, n_rot, 2) / n_rot)
    angle = positions[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], 1)


def turned(x: Any, table: Any, job: QkPrepJob, weight: Any) -> Any:
    """x (n, heads, head_dim) normed and rotated, in double precision."""
    x = x.astype(np.float64)
    if job.eps is not None:
        x = x / np.sqrt((x * x).mean(2, keepdims=True) + job.eps) * weight
    half = job.n_rot // 2
    first = np.arange(0, job.n_rot, 2) if job.pairing == "norm" else np.arange(half)
    second = first + (1 if job.pairing == "norm" else half)
    cos, sin = table[:, None, :half], table[:, None, half:]
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def inputs_of(job: QkPrepJob, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n + job.head_dim)
    width = (job.heads + 2 * job.kv_heads) * job.head_dim
    slots = rng.permutation(4 * job.block_tokens)[:n].astype(np.int32)
    if n > 1:
        slots[n // 2] = -1
    return {
        "qkv": rng.standard_normal((n, width), np.float32),
        "table": table_of(rng.integers(0, 3000, n), job.n_rot).astype(np.float32),
        "slots": slots,
        "norms": rng.standard_normal((2, job.head_dim), np.float32),
    }


def untouched(job: QkPrepJob) -> list[Any]:
    """The pool before a call."""
    return kv_pools.filled(
        4, job.kv_heads, job.head_dim,
        dtype=job.kv_dtype, block_tokens=job.block_tokens, filler=FILLER,
    )  # fmt: skip


def arguments(job: QkPrepJob, data: dict[str, Any]) -> list[Any]:
    """Those of the kernel that stand before the pool."""
    q, kv = job.heads * job.head_dim, job.kv_heads * job.head_dim
    qkv = data["qkv"]
    parts = [qkv] if job.joined else [a.copy() for a in np.split(qkv, [q, q + kv], 1)]
    norms = [*data["norms"]] if job.eps is not None else []
    return [*parts, data["table"], data["slots"], *norms]


def check(job: QkPrepJob, data: dict[str, Any], q: Any, pools: list[Any]) -> None:
    """Assert that q and the arrays of the pool are what numpy makes of `data`."""
    heads, kv_heads, n = job.heads, job.kv_heads, len(data["slots"])
    x = data["qkv"].reshape(n, -1, job.head_dim)
    want_q = turned(x[:, :heads], data["table"], job, data["norms"][0])
    close(q.reshape(want_q.shape), want_q, 1e-6)

    want_k = turned(x[:, heads : heads + kv_heads], data["table"], job, data["norms"][1])
    want = untouched(job)
    for row, slot in enumerate(data["slots"]):
        if slot >= 0:
            place = divmod(int(slot), job.block_tokens)
            k, v = want_k[row].astype(np.float32), x[row, heads + kv_heads :]
            kv_pools.write(want, job.kv_dtype, place, k, v)
    half = len(pools) // 2
    for got, expected in zip(pools[:half], want[:half], strict=True):
        # A key is not rounded as numpy's: its last bit may tip a code, or that of an f16.
        tolerance = {"int8": 1, "float16": 1e-3, "float32": 1e-6}[got.dtype.name]
        close(got, expected, tolerance)
    for got, expected in zip(pools[half:], want[half:], strict=True):
        same(got, expected)


def extremes(job: QkPrepJob) -> tuple[dict[str, Any], list[Any]]:
    """Keys that are not turned, with ties, zeros and very large and small ones; the pool after.

    For one K/V head of 128 columns without a norm. The pool's arrays are those of gguf, to the bit.
    """
    data = inputs_of(job, 20)
    data["slots"] = np.arange(20, dtype=np.int32)
    data["table"][:] = np.repeat((1, 0), job.n_rot // 2)  # cos, sin
    key = data["qkv"][:, -256:-128]
    key[0] = 0
    key[1] *= 1e-30
    key[2] *= 1e4
    key[3] = np.arange(128) - 64.5
    key[3, ::32] = 127  # a scale of 1, so all other codes are halves
    key[4, 5] = -1000
    want = untouched(job)
    for row in range(20):
        k, v = data["qkv"][row, -256:].reshape(2, 1, 128)
        kv_pools.write(want, "q8_0", (0, row), k, v)
    return data, want
