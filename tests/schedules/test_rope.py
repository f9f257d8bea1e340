"""Rotary tables and the preparation of q, k and v against numpy in double precision."""

from __future__ import annotations

from typing import Any

import kv_pools
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


def untouched(job: QkPrep) -> list[Any]:
    """The pool before a call."""
    return kv_pools.filled(
        4, job.kv_heads, job.head_dim,
        dtype=job.kv_dtype, block_tokens=job.block_tokens, filler=FILLER,
    )  # fmt: skip


def run(job: QkPrep, data: dict[str, Any], static: bool) -> list[Any]:
    """q, and the arrays of the pool after one call."""
    n = len(data["slots"])
    q, kv = job.heads * job.head_dim, job.kv_heads * job.head_dim
    pools = [tvm.runtime.tensor(array) for array in untouched(job)]
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
        (9, 3, 64, 64, "q8_0", True),
        (2, 1, 96, 16, "q8_0", False),
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
    q, *pools = run(job, data, static=False)
    x = data["qkv"].reshape(7, -1, head_dim)
    want_q = turned(x[:, :heads], data["table"], job, data["norms"][0])
    np.testing.assert_allclose(q.reshape(want_q.shape), want_q, rtol=1e-5, atol=3e-6)

    want_k = turned(x[:, heads : heads + kv_heads], data["table"], job, data["norms"][1])
    want = untouched(job)
    for row, slot in enumerate(data["slots"]):
        if slot >= 0:
            place = divmod(int(slot), job.block_tokens)
            k, v = want_k[row].astype(np.float32), x[row, heads + kv_heads :]
            kv_pools.write(want, kv_dtype, place, k, v)
    half = len(pools) // 2
    for got, expected in zip(pools[:half], want[:half], strict=True):
        # A key is not rounded as numpy's: its last bit may tip a code.
        tolerance = 1 if got.dtype == np.int8 else 1e-5 if kv_dtype == "float32" else 1e-3
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    for got, expected in zip(pools[half:], want[half:], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_q8_0_keys_are_those_of_gguf() -> None:
    """Bit for bit where a key is not turned, in codes and scales; at ties, zeros and extremes."""
    job = QkPrep(1, 1, 128, 2, "neox", kv_dtype="q8_0", block_tokens=32)
    data = inputs_of(job, 20)
    data["slots"] = np.arange(20, dtype=np.int32)
    data["table"][:] = (1, 0)  # cos, sin
    key = data["qkv"][:, 128:256]
    key[0] = 0
    key[1] *= 1e-30
    key[2] *= 1e4
    key[3] = np.arange(128) - 64.5
    key[3, ::32] = 127  # a scale of 1, so all other codes are halves
    key[4, 5] = -1000
    _, *pools = run(job, data, static=False)
    want = untouched(job)
    for row in range(20):
        k, v = data["qkv"][row].reshape(3, 1, 128)[1:]
        kv_pools.write(want, "q8_0", (0, row), k, v)
    for got, expected in zip(pools, want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_what_is_no_number_makes_the_scale_none() -> None:
    job = QkPrep(1, 1, 64, 64, "norm", kv_dtype="q8_0")
    data = inputs_of(job, 1)
    data["qkv"][0, 64 + 40] = np.nan
    data["qkv"][0, 128 + 3] = np.nan
    *_, key_scales, _, value_scales = run(job, data, static=True)
    block, token = divmod(int(data["slots"][0]), 16)
    assert np.isnan(key_scales[block, 0, :, token]).tolist() == [False, True]
    assert np.isnan(value_scales[block, 0, :, token]).tolist() == [True, False]


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize("kv_dtype", ["float16", "q8_0"])
def test_a_row_has_the_same_bits_in_every_call(pairing: str, kv_dtype: str) -> None:
    job = QkPrep(9, 3, 64, 64, pairing, EPS, kv_dtype, block_tokens=32)
    data = inputs_of(job, 40)
    q, *pools = run(job, data, static=False)
    for first, last in ((5, 6), (30, 33)):
        part = {k: a if k == "norms" else a[first:last] for k, a in data.items()}
        q_part, *part_pools = run(job, part, static=True)
        np.testing.assert_array_equal(q_part, q[first:last])
        for slot in part["slots"]:
            place = divmod(int(slot), 32)
            for a, b in zip(kv_pools.at(part_pools, place), kv_pools.at(pools, place), strict=True):
                np.testing.assert_array_equal(a, b)
