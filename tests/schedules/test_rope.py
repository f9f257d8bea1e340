"""Rotary tables and the preparation of q, k and v against numpy in double precision."""

from __future__ import annotations

from typing import Any

import kv_pools
import numpy as np
import pytest
import tvm
from kernel_calls import build, call
from qk_inputs import EPS, arguments, check, extremes, inputs_of, table_of, untouched

from xpuc.schedules.llvm.rope import QkPrep, qk_prep, rope_table


def run(job: QkPrep, data: dict[str, Any], static: bool) -> list[Any]:
    """q, and the arrays of the pool after one call."""
    n = len(data["slots"])
    pools = [tvm.runtime.tensor(array) for array in untouched(job)]
    kernel = build(qk_prep(job, n if static else None))
    (out,) = call(
        kernel, [*arguments(job, data), *pools], [((n, job.heads * job.head_dim), "float32")]
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
    check(job, data, q, pools)


def test_q8_0_keys_are_those_of_gguf() -> None:
    """Bit for bit where a key is not turned, in codes and scales; at ties, zeros and extremes."""
    job = QkPrep(1, 1, 128, 2, "neox", kv_dtype="q8_0", block_tokens=32)
    data, want = extremes(job)
    _, *pools = run(job, data, static=False)
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
