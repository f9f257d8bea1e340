"""Samplers one by one: llama.cpp's meanings, and what must hold for any logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import NAMED, candidates_of, draw_of, some_logits, tenths, top_ids

from xpuc.runtime.candidates import Candidates
from xpuc.runtime.logprobs import token_logprob


def after(name: str, logits: Any, tokens: list[int] | None = None, **options: Any) -> Candidates:
    candidates = candidates_of(logits)
    NAMED[name].apply(candidates, draw_of(tokens, **options))
    return candidates


def softmax(logits: Any) -> Any:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


@given(some_logits, st.integers(1, 310))
def test_top_k_keeps_k(logits: Any, k: int) -> None:
    kept = after("top_k", logits, top_k=k)
    assert len(kept) == min(k, len(logits))
    assert kept.logits.tolist() == sorted(logits.tolist(), reverse=True)[:k]
    assert (np.sort(kept.ids) == np.unique(kept.ids)).all()
    assert (kept.logits == logits[kept.ids]).all()


@given(some_logits, st.floats(0.01, 0.99), st.integers(0, 5))
def test_top_p_keeps_the_shortest_prefix(logits: Any, p: float, min_keep: int) -> None:
    kept = after("top_p", logits, top_p=p, min_keep=min_keep)
    falling = np.sort(softmax(logits))[::-1].cumsum()
    shortest = next(n for n in range(1, len(logits) + 1) if falling[n - 1] >= p - 1e-6)
    assert len(kept) in {min(max(shortest, min_keep), len(logits))} | (
        # a sum that equals p but for rounding may fall either way
        {max(shortest + 1, min_keep)} if abs(falling[shortest - 1] - p) < 1e-6 else set()
    )
    assert kept.logits.tolist() == sorted(logits.tolist(), reverse=True)[: len(kept)]


def test_top_p_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    for p in (0.001, 0.2, 0.9, 0.999):
        falling = np.sort(softmax(logits))[::-1].cumsum()
        assert len(after("top_p", logits, top_p=p)) == np.searchsorted(falling, p) + 1


@given(some_logits, st.floats(0.001, 1.0), st.integers(0, 5))
def test_min_p_keeps_what_is_likely_enough(logits: Any, p: float, min_keep: int) -> None:
    kept = after("min_p", logits, min_p=p, min_keep=min_keep)
    likely = logits.astype(np.float64) >= logits.max() + math.log(p)
    borderline = np.abs(logits - logits.max() - math.log(p)) < 1e-4
    if not borderline.any():
        assert len(kept) == min(max(int(likely.sum()), min_keep), len(logits))
    assert logits.max() in kept.logits


def test_typ_p_keeps_what_is_as_surprising_as_expected() -> None:
    # By hand: p = 0.5, 0.25, 0.125, 0.125; entropy 1.75 bits; surprises 1, 2, 3, 3 bits;
    # distances 0.75, 0.25, 1.25, 1.25: the second is the most typical, then the first.
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert after("typ_p", logits, typical_p=0.2).ids.tolist() == [1]
    assert after("typ_p", logits, typical_p=0.3).ids.tolist() == [1, 0]
    assert after("typ_p", logits, typical_p=0.8).ids.tolist() == [1, 0, 2]
    assert after("typ_p", logits, typical_p=0.2, min_keep=2).ids.tolist() == [1, 0]
    assert len(after("typ_p", [1.0, 1.0, 1.0, 1.0], typical_p=0.5)) == 3, "it must pass p"


def test_top_n_sigma_leaves_impossible_tokens_out_of_the_mean() -> None:
    logits = [4.0, 3.0, 2.0, 1.0, -math.inf]  # of the four: mean 2.5, deviation 1.118
    assert after("top_n_sigma", logits, top_n_sigma=1.0).ids.tolist() == [0, 1]
    assert after("top_n_sigma", logits, top_n_sigma=0.5).ids.tolist() == [0]
    assert after("top_n_sigma", logits, top_n_sigma=9.0).ids.tolist() == [0, 1, 2, 3]


def test_penalties() -> None:
    logits = [3.0, -3.0, 1.0, 2.0]
    tokens = [3, 0, 1, 1]
    repeat = after("penalties", logits, tokens, repeat_penalty=2.0)
    assert repeat.logits.tolist() == [1.5, -6.0, 1.0, 1.0]
    frequency = after("penalties", logits, tokens, frequency_penalty=0.5)
    assert frequency.logits.tolist() == [2.5, -4.0, 1.0, 1.5]
    presence = after("penalties", logits, tokens, presence_penalty=0.5)
    assert presence.logits.tolist() == [2.5, -3.5, 1.0, 1.5]
    recent = after("penalties", logits, tokens, presence_penalty=0.5, penalty_last_n=2)
    assert recent.logits.tolist() == [3.0, -3.5, 1.0, 2.0]
    whole = after("penalties", logits, [3] + [0] * 99, presence_penalty=0.5, penalty_last_n=-1)
    assert whole.logits.tolist() == [2.5, -3.0, 1.0, 1.5]


@given(
    st.integers(0, 2**32), st.integers(1, 700), st.integers(0, 900),
    st.floats(0.1, 3.0), st.floats(-1.0, 1.0), st.floats(-1.0, 1.0), st.booleans(),
)  # fmt: skip
def test_penalties_one_token_at_a_time(
    seed: int, n: int, n_tokens: int, repeat: float, frequency: float, presence: float, few: bool
) -> None:
    logits = tenths(seed, n)
    tokens = np.random.default_rng(seed).integers(0, n, n_tokens).tolist()
    candidates = candidates_of(logits)
    if few:
        candidates.keep_top(40)
    expected = dict(zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True))
    for token in set(tokens) & set(expected):
        logit, by = np.float32(expected[token]), np.float32(repeat)
        less = tokens.count(token) * frequency
        expected[token] = np.float32(
            float(logit / by if logit > 0 else logit * by) - less - presence
        )
    options = {"repeat_penalty": repeat, "frequency_penalty": frequency}
    draw = draw_of(tokens, **options, presence_penalty=presence, penalty_last_n=-1)
    NAMED["penalties"].apply(candidates, draw)
    assert candidates.ids.tolist() == list(expected)
    assert candidates.logits.tolist() == list(expected.values())


def test_xtc_drops_all_above_the_threshold_but_the_last() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    options: dict[str, Any] = {"xtc_probability": 1.0, "xtc_threshold": 0.15}
    assert after("xtc", logits, **options).ids.tolist() == [2, 3]
    assert after("xtc", logits, **options, min_keep=3).ids.tolist() == [0, 1, 2, 3]
    for threshold in (0.35, 0.45):  # one token is above, none is
        assert len(after("xtc", logits, xtc_probability=1.0, xtc_threshold=threshold)) == 4
    often = [
        len(after("xtc", logits, **options | {"xtc_probability": 0.3}, seed=n)) for n in range(200)
    ]
    assert 30 < often.count(2) < 90


def test_dynamic_temperature() -> None:
    """By hand: 2 bits of entropy of 2, and 1.75 of 2; between 0.5 and 1.5, squared."""
    even = after("temperature", [1.0] * 4, temperature=1.0, dynatemp_range=0.5)
    assert even.logits == pytest.approx([1 / 1.5] * 4)
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    some = after("temperature", logits, temperature=1.0, dynatemp_range=0.5, dynatemp_exponent=2.0)
    assert some.logits == pytest.approx(logits / (0.5 + (1.75 / 2) ** 2), rel=1e-6)
    # A range wider than the temperature ends at zero, where the likeliest is all that is left.
    sure = after("temperature", [50.0, 0.0], temperature=0.5, dynatemp_range=2.0)
    assert sure.probabilities() == pytest.approx([1.0, 0.0])
    assert after("temperature", [3.0], temperature=2.0, dynatemp_range=1.0).logits == [1.5]


@given(some_logits, st.floats(0.01, 3.0), st.floats(0.0, 5.0), st.floats(0.0, 4.0))
def test_a_dynamic_temperature_stays_in_its_range(
    logits: Any, temperature: float, spread: float, exponent: float
) -> None:
    cooled = after(
        "temperature", logits, temperature=temperature, dynatemp_range=spread,
        dynatemp_exponent=exponent,
    ).probabilities()  # fmt: skip
    hottest = softmax(logits.astype(np.float64) / (temperature + spread))
    coldest = softmax(logits.astype(np.float64) / max(temperature - spread, 1e-8))
    assert hottest.max() - 1e-5 <= cooled.max() <= coldest.max() + 1e-5
    assert cooled.argmax() in np.flatnonzero(logits == logits.max())


@given(some_logits, st.lists(st.integers(0, 299), unique=True), st.integers(0, 2**32))
def test_find_places_tokens_among_those_left(logits: Any, tokens: list[int], seed: int) -> None:
    candidates = candidates_of(logits)
    left = np.random.default_rng(seed).permutation(len(logits))[: len(logits) // 2]
    candidates.keep(left, is_sorted=False)
    places, values = candidates.find({token: token / 2 for token in tokens})
    found = dict(zip(values.tolist(), places.tolist(), strict=True))
    assert found == {
        token / 2: left.tolist().index(token) for token in tokens if token in left.tolist()
    }


@given(some_logits, st.integers(1, 300), st.integers(-220, 200), st.sampled_from([0.5, 2.0]))
def test_the_likeliest_few_are_what_arrays_of_them_would_be(
    logits: Any, k: int, bound: int, divisor: float
) -> None:
    candidates = candidates_of(logits)
    ids = np.argsort(-logits, kind="stable")[:k]
    candidates.keep_top(k)
    assert candidates.largest == logits.max()
    candidates.divide(divisor)
    least = float(np.float32(bound / 10))
    ids = ids[: max(1, (logits[ids] / divisor >= least).sum())]
    candidates.keep_from(least, least=1)
    assert len(candidates) == len(ids)
    assert [candidates.id_at(place) for place in range(len(ids))] == ids.tolist()
    left = logits[ids] / divisor
    weights = np.exp((left - left[0]).astype(np.float64))
    assert list(candidates.reached()) == pytest.approx(weights.cumsum())
    places, _ = candidates.find(dict.fromkeys(range(0, len(logits), 2), 0.0))
    assert places.tolist() == np.flatnonzero(ids % 2 == 0).tolist()
    candidates.writable()[places] -= 50
    assert candidates.ids.tolist() == ids.tolist()
    assert candidates.logits.tolist() == pytest.approx((left - 50 * (ids % 2 == 0)).tolist())


def test_logits_are_read_again_where_a_model_writes_them_again() -> None:
    random, candidates = np.random.default_rng(0), Candidates()
    rows = random.standard_normal((300, 1000)).astype(np.float32)
    for _ in range(2):
        for row in list(rows):
            candidates.begin(row)
            candidates.keep_top(40)
            assert candidates.ids.tolist() == np.argsort(-row, kind="stable")[:40].tolist()
        rows[:] = random.standard_normal(rows.shape)


@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(1, 3100))
def test_top_ids_is_a_stable_sort(seed: int, n: int, k: int) -> None:
    logits = tenths(seed, n)
    assert top_ids(logits, k) == np.argsort(-logits, kind="stable")[:k].tolist()


def test_top_ids_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal(50_001).astype(np.float32)
    logits[-1] = 10.0  # in the tail that fills no group
    for k in (1, 40, 97, 98, 1000):
        assert top_ids(logits, k) == np.argsort(-logits, kind="stable")[:k].tolist()


@given(some_logits)
def test_logprobs_are_the_models_own(logits: Any) -> None:
    expected = np.log(softmax(logits))
    got = token_logprob(Candidates(), logits, 0, 3)
    assert got.logprob == pytest.approx(expected[0], abs=1e-4)
    assert [id_ for id_, _ in got.top] == np.argsort(-logits, kind="stable")[:3].tolist()
    assert [p for _, p in got.top] == pytest.approx([expected[id_] for id_, _ in got.top], abs=1e-4)
