"""The preparation of q, k and v on the emulated GPU, against numpy in double precision."""

from __future__ import annotations

from typing import Any

import kv_pools
import numpy as np
import pytest
from emu.device import InOut, Out, run
from expectations import close, same
from qk_inputs import EPS, arguments, check, extremes, inputs_of, turned, untouched

from xpuc.schedules.attention_job import QkPrepJob
from xpuc.schedules.cuda.rope import qk_prep


def prepare(job: QkPrepJob, data: dict[str, Any], n: int | None = None) -> list[Any]:
    """q, and the arrays of the pool after one call."""
    rows = len(data["slots"])
    *pools, q = run(
        qk_prep(job, n),
        *arguments(job, data),
        *(InOut(array) for array in untouched(job)),
        Out((rows, job.heads * job.head_dim), "float32"),
    )
    return [q, *pools]


@pytest.mark.parametrize("pairing", ["norm", "neox"])
@pytest.mark.parametrize("eps", [None, EPS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "n_rot", "kv_dtype", "joined"),
    [
        (9, 3, 64, 64, "float16", True),
        (4, 1, 256, 256, "float32", False),
        (3, 3, 80, 32, "float16", True),
        (7, 1, 16, 4, "float32", False),
        (8, 1, 128, 128, "q8_0", True),
        (2, 1, 96, 16, "q8_0", False),
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
    job = QkPrepJob(heads, kv_heads, head_dim, n_rot, pairing, eps, kv_dtype, joined=joined)
    data = inputs_of(job, 7)
    q, *pools = prepare(job, data)
    check(job, data, q, pools)


def test_q8_0_keys_are_those_of_gguf() -> None:
    """Bit for bit where a key is not turned, in codes and scales; at ties, zeros and extremes."""
    job = QkPrepJob(1, 1, 128, 2, "neox", kv_dtype="q8_0", block_tokens=32)
    data, want = extremes(job)
    _, *pools = prepare(job, data)
    for got, expected in zip(pools, want, strict=True):
        same(got, expected)


def test_what_is_no_number_makes_the_scale_none() -> None:
    job = QkPrepJob(1, 1, 64, 64, "norm", kv_dtype="q8_0")
    data = inputs_of(job, 1)
    data["qkv"][0, 64 + 40] = np.nan
    data["qkv"][0, 128 + 3] = np.nan
    *_, key_scales, _, value_scales = prepare(job, data, 1)
    block, token = divmod(int(data["slots"][0]), 16)
    _, k, v = np.nan_to_num(data["qkv"]).reshape(3, 1, 64)
    k = turned(k[None], data["table"], job, None)[0].astype(np.float32)
    (_, of_key), (_, of_value) = (kv_pools.stored("q8_0", rows) for rows in (k, v))
    of_key[0, 1] = of_value[0, 0] = np.nan
    close(key_scales[block, :, :, token], of_key, 1e-3)
    same(value_scales[block, :, :, token], of_value)
