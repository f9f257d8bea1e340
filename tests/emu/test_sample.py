"""The sampler on the emulated GPU, against a chain in numpy and against the host's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from draws import GREEDY, draw, rows_of
from emu.device import Out, build, call, run
from expectations import same

from xpuc.artifact import TOP_K
from xpuc.runtime.sampler import Chain
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.schedules.cuda.sample import group_best, groups_of, sample

EDGE = 1e-6  # a draw or a cut this close to a sum may be rounded to either side of it


def sampled(logits: np.ndarray, options: list[dict[str, Any]], want: Any) -> None:
    """Assert that these ids are drawn."""
    m, v = logits.shape
    find, choose = kernels(v)
    rows = rows_of(options)
    (best,) = run(find, logits, rows, Out((m, groups_of(v)), "uint32"))
    same(best, best_keys(logits, options))
    (ids,) = run(choose, logits, best, rows, Out((m,), "int32"))
    same(ids, want)


@cache
def kernels(v: int) -> tuple[Any, Any]:
    """Of a vocabulary; `run` builds each once."""
    return group_best(v), sample(v)


def best_keys(logits: np.ndarray, options: list[dict[str, Any]]) -> np.ndarray:
    """The largest of each 32 neighbours, as a number in the order of floats; that of a banned id is
    the least, of a NaN the largest."""
    m, v = logits.shape
    bits = logits.view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    for row, given in zip(keys, options, strict=True):
        row[list(given.get("banned", ()))] = 0
    keys[np.isnan(logits)] = 0xFFFFFFFF
    padded = np.zeros((m, 32 * groups_of(v)), np.uint32)
    padded[:, :v] = keys
    return padded.reshape(m, -1, 32).max(2)


def normal(m: int, v: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(m * v).standard_normal((m, v))).astype(np.float32)


@pytest.mark.parametrize("v", [1, 40, 997])
def test_options_of_a_row_are_its_own(v: int) -> None:
    logits = normal(8, v)
    options = [
        {"u": 0.99}, GREEDY, {"top_k": 1, "u": 0.9}, {"top_p": 0.0, "u": 0.999},
        {"top_p": 0.4, "u": 0.7}, {"min_p": 0.3, "u": 0.8}, {"temperature": 5.0, "u": 0.6},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.02, "temperature": 0.3, "u": 0.97},
    ]  # fmt: skip
    want = [draw(row, o)[0] for row, o in zip(logits, options, strict=True)]
    sampled(logits, options, want)
    for row, o, id_ in zip(logits[-3:], options[-3:], want[-3:], strict=True):
        sampled(row[None], [o], id_)


@pytest.mark.parametrize("arrange", ["falling", "rising", "few values", "one group", "equal"])
def test_the_largest_are_found_however_they_lie(arrange: str) -> None:
    logits = normal(1, 40_000)
    if arrange in ("falling", "rising"):
        logits.sort()
    if arrange == "falling":
        logits = logits[:, ::-1].copy()
    if arrange == "few values":
        logits = np.round(logits / 4)
        logits[logits == 0] *= np.random.default_rng(0).choice([-1, 1], (logits == 0).sum())
    if arrange == "one group":
        logits[0, 32000:32100] += 40
    if arrange == "equal":
        logits[:] = -2.5
    draws = [{"u": u, "temperature": 1e3} for u in np.linspace(0.001, 0.999, 7)]
    rows = np.repeat(logits, len(draws), axis=0)
    sampled(rows, draws, [draw(logits[0], o)[0] for o in draws])


def test_logits_that_are_no_numbers_have_no_id_and_impossible_ones_are_not_drawn() -> None:
    logits = normal(8, 997)
    logits[0, 70] = np.nan
    logits[1, 70] = np.array(0xFFC00001, np.uint32).view(np.float32)  # a negative one
    logits[2, 70] = logits[3, 70] = np.inf
    logits[4] = logits[5] = -np.inf
    logits[6, 10:], logits[7, 990] = -np.inf, np.nan
    with_u = {"u": 0.999999}
    want = [-1, -1, -1, 70, -1, 0, draw(logits[6, :10], with_u)[0], -1]
    sampled(logits, [with_u, GREEDY] * 4, want)


@pytest.mark.parametrize("v", [40, 997])
def test_banned_ids_are_not_there(v: int) -> None:
    logits = np.repeat(normal(1, v), 4, axis=0)
    falling = np.argsort(-logits[0], kind="stable").tolist()
    options = [
        GREEDY | {"banned": falling[:1]}, {"u": 0.3, "banned": falling[:8]},
        {"u": 0.3, "banned": [falling[-1], *falling[1:4]], "top_k": 5},
        {"u": 1 - 1e-9, "top_p": 0.9, "banned": [falling[2]]},
    ]  # fmt: skip
    want = [draw(row, o)[0] for row, o in zip(logits, options, strict=True)]
    sampled(logits, options, want)
    assert want[0] == falling[1]
    logits[0, falling[0]], logits[1, :] = np.nan, np.nan
    sampled(logits, options, [-1, -1, *want[2:]])


def test_cold_and_hot_draws() -> None:
    logits = np.tile(normal(1, 997, 60.0), (4, 1))
    likeliest = int(logits[0].argmax())
    cold = {"temperature": 1e-8, "u": 0.9999}
    hot = {"temperature": 1e8, "u": 63.5 / 64}
    last = np.argsort(-logits[0])[TOP_K - 1]  # although its weight was 0 before
    want = [likeliest, last, draw(logits[0], hot | {"top_p": 0.5})[0], likeliest]
    sampled(logits, [cold, hot, hot | {"top_p": 0.5}, hot | {"min_p": 1.0}], want)


@pytest.mark.slow
def test_hundreds_of_requests_get_what_the_host_gives_them() -> None:
    m, v = 300, 997
    random = np.random.default_rng(5)
    logits = (random.uniform(0.5, 6, (m, 1)) * random.standard_normal((m, v))).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 4) / 4
    options, want, edges = [], [], []
    for seed, row in enumerate(logits):
        given = {
            "temperature": float(random.uniform(0.05, 3)), "top_k": int(random.integers(1, 65)),
            "top_p": float(random.choice([1, random.uniform()])),
            "min_p": float(random.choice([0, 0.3 * random.uniform()])),
        }  # fmt: skip
        u = np.random.Generator(np.random.PCG64(seed)).random()
        options.append(given | {"u": u})
        want.append(Chain(SamplingParams(**given), seed=seed).sample(row, []))
        id_, edge = draw(row, options[-1])
        edges.append(edge)
        assert edge < EDGE or id_ == want[-1]
    built = build(*kernels(v))
    find, choose = (built[kernel.attrs["global_symbol"]] for kernel in kernels(v))
    rows = rows_of(options)
    (best,) = call(find, logits, rows, Out((m, groups_of(v)), "uint32"))
    (ids,) = call(choose, logits, best, rows, Out((m,), "int32"))
    decided = np.array(edges) > EDGE
    assert decided.sum() > 0.99 * m
    np.testing.assert_array_equal(ids[decided], np.array(want)[decided])
