"""Rotary tables and the preparation of q, k and v against numpy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from kernel_calls import build, call

from xpuc.schedules.llvm.rope import QkPrep, qk_prep, rope_table

EPS = 1e-6
FILLER = 9.0  # what the pools hold before a call


def table_of(positions: Any, n_rot: int) -> Any:
    inv_freq = 10000.0 ** (-np.arange(0, n_rot, 2) / n_rot)
    angle = positions[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], 1)


def turned(x: Any, table: Any, job: QkPrep, weight: Any) -> Any:
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


def inputs_of(job: QkPrep, n: int) -> dict[str, Any]:
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


def run(job: QkPrep, data: dict[str, Any], static: bool) -> list[Any]:
    """q, the keys and the values after one call."""
    n = len(data["slots"])
    hd, q, kv = job.head_dim, job.heads * job.head_dim, job.kv_heads * job.head_dim
    pools = [
        tvm.runtime.tensor(np.full((4, job.kv_heads, *tail), FILLER, job.kv_dtype))
        for tail in ((hd, job.block_tokens), (job.block_tokens, hd))
    ]
    qkv = data["qkv"]
    parts = [qkv] if job.joined else [a.copy() for a in np.split(qkv, [q, q + kv], 1)]
    norms = [*data["norms"]] if job.eps is not None else []
    kernel = build(qk_prep(job, n if static else None))
    (out,) = call(
        kernel, [*parts, data["table"], data["slots"], *norms, *pools], [((n, q), "float32")]
    )
    return [out, *(p.numpy() for p in pools)]


@pytest.mark.parametrize(("n", "static"), [(1, True), (4, True), (600, False)])
def test_rope_table(n: int, static: bool) -> None:
    n_rot, mscale = 20, 1.25
    positions = np.random.default_rng(n).integers(0, 200_000, n).astype(np.int32)
    inv_freq = 10000.0 ** (-np.arange(0, n_rot, 2) / n_rot)
    kernel = build(rope_table(n_rot, n if static else None, mscale))
    (got,) = call(kernel, [positions, inv_freq], [((n, n_rot), "float32")])
    np.testing.assert_allclose(got, table_of(positions, n_rot) * mscale, rtol=0, atol=1.5e-7)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize("eps", [None, EPS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "n_rot", "kv_dtype", "joined"),
    [
        (9, 3, 64, 64, "float16", True),
        (4, 1, 256, 256, "float32", False),
        (3, 3, 80, 32, "float16", True),
        (2, 1, 16, 4, "float32", False),
    ],
)
def test_qk_prep(
    pairing: str,
    eps: float | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    n_rot: int,
    kv_dtype: str,
    joined: bool,
) -> None:
    job = QkPrep(heads, kv_heads, head_dim, n_rot, pairing, eps, kv_dtype, joined=joined)
    data = inputs_of(job, 7)
    q, keys, values = run(job, data, static=False)
    x = data["qkv"].reshape(7, -1, head_dim)
    want_q = turned(x[:, :heads], data["table"], job, data["norms"][0])
    np.testing.assert_allclose(q.reshape(want_q.shape), want_q, rtol=1e-5, atol=3e-6)

    want_k = turned(x[:, heads : heads + kv_heads], data["table"], job, data["norms"][1])
    want_keys, want_values = np.full_like(keys, FILLER), np.full_like(values, FILLER)
    for row, slot in enumerate(data["slots"]):
        if slot >= 0:
            block, token = divmod(int(slot), job.block_tokens)
            want_keys[block, :, :, token] = want_k[row]
            want_values[block, :, token] = x[row, heads + kv_heads :]
    tolerance = 1e-3 if kv_dtype == "float16" else 1e-5
    np.testing.assert_allclose(keys, want_keys, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(values, want_values)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_a_row_has_the_same_bits_in_every_call(pairing: str) -> None:
    job = QkPrep(9, 3, 64, 64, pairing, EPS, block_tokens=32)
    data = inputs_of(job, 40)
    q, keys, values = run(job, data, static=False)
    for first, last in ((5, 6), (30, 33)):
        part = {k: a if k == "norms" else a[first:last] for k, a in data.items()}
        q_part, keys_part, values_part = run(job, part, static=True)
        np.testing.assert_array_equal(q_part, q[first:last])
        for slot in part["slots"]:
            block, token = divmod(int(slot), 32)
            np.testing.assert_array_equal(keys_part[block, ..., token], keys[block, ..., token])
            np.testing.assert_array_equal(values_part[block, :, token], values[block, :, token])
