"""Samplers: llama.cpp's meanings, golden values, and what must hold for any logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.runtime.candidates import Candidates, top_ids
from xpuc.runtime.logprobs import token_logprob
from xpuc.runtime.sampler import SAMPLERS, Chain, DeadEndError, Draw, LogitsError
from xpuc.runtime.sampling_params import DEFAULT_ORDER, SamplingParams

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
NAMED = {each.name: each for each in SAMPLERS}


def _tenths(seed: int, n: int) -> Any:
    """Logits a tenth apart at least: a sum that decides is then not decided by rounding."""
    return (np.random.default_rng(seed).integers(-200, 200, n) / 10).astype(np.float32)


some_logits = st.builds(_tenths, st.integers(0, 2**32), st.integers(1, 300))


def draw_of(tokens: list[int] | None = None, *, seed: int = 0, **options: Any) -> Draw:
    random = np.random.Generator(np.random.PCG64(seed))
    return Draw(SamplingParams(**(OFF | options)), tokens or [], random, {})


def after(name: str, logits: Any, tokens: list[int] | None = None, **options: Any) -> Candidates:
    candidates = Candidates(np.asarray(logits, np.float32))
    NAMED[name].apply(candidates, draw_of(tokens, **options))
    return candidates


def softmax(logits: Any) -> Any:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


# The example ChainOrder of "Reading inference engine codebases": six candidates, k = 4, p = 0.90,
# min_p = 0.20, temperature = 2.0, the candidates after each sampler.
CHAIN_ORDER = [2.0, 1.5, 0.3, 3.1, -1.0, 2.8]
DEFAULT_STEPS = [
    ("top_k", {3: 0.439, 5: 0.326, 0: 0.146, 1: 0.089}),
    ("top_p", {3: 0.482, 5: 0.357, 0: 0.161}),
    ("min_p", {3: 0.482, 5: 0.357, 0: 0.161}),
    ("temperature", {3: 0.410, 5: 0.353, 0: 0.237}),
]
FOUR = {3: 0.346, 5: 0.298, 0: 0.200, 1: 0.156}
TEMPERATURE_FIRST_STEPS = [
    ("temperature", {0: 0.177, 1: 0.138, 2: 0.076, 3: 0.307, 4: 0.039, 5: 0.264}),
    ("top_k", FOUR),
    ("top_p", FOUR),
    ("min_p", FOUR),
]


@pytest.mark.parametrize("steps", [DEFAULT_STEPS, TEMPERATURE_FIRST_STEPS])
def test_chain_order_golden(steps: list[tuple[str, dict[int, float]]]) -> None:
    candidates = Candidates(np.array(CHAIN_ORDER, np.float32))
    draw = draw_of(top_k=4, top_p=0.90, min_p=0.20, temperature=2.0)
    for name, expected in steps:
        NAMED[name].apply(candidates, draw)
        assert candidates.ids.tolist() == list(expected)
        assert candidates.probabilities() == pytest.approx(list(expected.values()), abs=5e-4)


@given(some_logits, st.integers(1, 310), st.floats(0.001, 1.0))
def test_where_order_does_not_matter(logits: Any, k: int, p: float) -> None:
    """top_k and min_p keep what each of them keeps; top_p after them sees less, so it keeps less or
    the same; a temperature at the end keeps all."""
    draw = draw_of(top_k=k, min_p=p, top_p=0.8, temperature=1.7)
    kept = {}
    for order in ("top_k;min_p", "min_p;top_k", "top_k;top_p", "top_p;top_k", "top_k;temperature"):
        candidates = Candidates(logits)
        for name in order.split(";"):
            NAMED[name].apply(candidates, draw)
        kept[order] = set(candidates.ids.tolist())
    assert kept["top_k;min_p"] == kept["min_p;top_k"]
    assert kept["top_k;top_p"] <= kept["top_p;top_k"]
    assert kept["top_k;temperature"] == set(top_ids(logits, k).tolist())


@given(some_logits, st.integers(0, 2**32), st.permutations(DEFAULT_ORDER))
def test_what_is_off_changes_nothing_wherever_it_stands(
    logits: Any, seed: int, order: list[str]
) -> None:
    on = ("top_k", "top_p", "min_p", "temperature")
    in_turn = iter(on)
    order = [next(in_turn) if name in on else name for name in order]
    one = Chain(SamplingParams(), seed=seed)
    other = Chain(SamplingParams(samplers=tuple(order)), seed=seed)
    assert [one.sample(logits, []) for _ in range(4)] == [
        other.sample(logits, []) for _ in range(4)
    ]


def test_the_order_of_a_request_is_the_order_of_its_chain() -> None:
    """Over many draws token 1 comes up only where temperature runs first."""
    options: dict[str, Any] = {"top_k": 4, "top_p": 0.90, "min_p": 0.20, "temperature": 2.0}
    logits = np.array(CHAIN_ORDER, np.float32)
    for order, expected in [
        ("top_k;top_p;min_p;temperature", {3, 5, 0}),
        ("temperature; top_k; top_p; min_p", {3, 5, 0, 1}),
    ]:
        chain = Chain(SamplingParams(samplers=order, **options), seed=1)
        assert {chain.sample(logits, []) for _ in range(300)} == expected


def test_the_default_chain_prints_llama_cpps_line() -> None:
    # The line llama.cpp prints with its defaults, which leaves out a logit bias that is not there.
    line = (
        "logits -> ?penalties -> ?dry -> ?top-n-sigma -> top-k -> ?typical -> top-p -> min-p"
        " -> ?xtc -> temp-ext -> dist"
    )
    described = Chain(SamplingParams()).describe()
    assert described.replace(" -> ?logit-bias", "") == line


@pytest.mark.parametrize(
    ("options", "active"),
    [
        (OFF, {"dist"}),
        (OFF | {"logit_bias": {3: 1.0}}, {"logit-bias", "dist"}),
        (OFF | {"repeat_penalty": 1.1}, {"penalties", "dist"}),
        (OFF | {"frequency_penalty": 0.1}, {"penalties", "dist"}),
        (OFF | {"presence_penalty": 0.1, "penalty_last_n": 0}, {"dist"}),
        (OFF | {"dry_multiplier": 0.8}, {"dry", "dist"}),
        (OFF | {"dry_multiplier": 0.8, "dry_base": 0.5}, {"dist"}),
        (OFF | {"top_n_sigma": 1.0}, {"top-n-sigma", "dist"}),
        (OFF | {"typical_p": 0.9}, {"typical", "dist"}),
        (OFF | {"xtc_probability": 0.5}, {"xtc", "dist"}),
        (OFF | {"xtc_probability": 0.5, "xtc_threshold": 0.6}, {"dist"}),
        (OFF | {"dynatemp_range": 0.5}, {"temp-ext", "dist"}),
        (OFF | {"temperature": 0.0}, {"temp-ext"}),
    ],
)
def test_what_is_off_is_marked_and_keeps_its_place(
    options: dict[str, Any], active: set[str]
) -> None:
    members = Chain(SamplingParams(**options)).describe().split(" -> ")
    assert [each.lstrip("?") for each in members] == [
        "logits", "logit-bias", *(each.label for each in SAMPLERS), "dist"
    ]  # fmt: skip
    assert {each for each in members[1:] if not each.startswith("?")} == active


def test_every_sampler_has_its_place_in_the_default_order() -> None:
    assert tuple(each.name for each in SAMPLERS) == DEFAULT_ORDER


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


def test_penalties_and_bias_find_their_tokens_among_those_left() -> None:
    chain = Chain(
        SamplingParams(
            samplers="top_k;penalties", top_k=2, presence_penalty=9.0, seed=0,
            logit_bias={0: 5.0, 1: -math.inf},
        )
    )  # fmt: skip
    # Biased: 5, -inf, 2, 1. The two likeliest are 0 and 2; 0 and 3 are penalised, so 2 is left.
    picked = [chain.sample(np.array([0, 9, 2, 1], np.float32), [0, 3]) for _ in range(50)]
    assert picked.count(2) >= 49


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


@given(some_logits, st.integers(0, 2**64))
@settings(max_examples=50)
def test_a_seed_repeats_its_tokens(logits: Any, seed: int) -> None:
    params = SamplingParams(seed=seed, xtc_probability=0.5, typical_p=0.9)
    one, other = Chain(params, seed=seed), Chain(params, seed=seed)
    tokens = [one.sample(logits, []) for _ in range(5)]
    assert [other.sample(logits, []) for _ in range(5)] == tokens


def test_dist_draws_at_the_probabilities() -> None:
    chain = Chain(SamplingParams(**OFF), seed=3)
    p = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = [chain.sample(np.log(p).astype(np.float32), []) for _ in range(8000)]
    assert np.bincount(drawn) / 8000 == pytest.approx(p, abs=0.02)


def test_a_draw_never_hits_an_impossible_token() -> None:
    chain = Chain(SamplingParams(**OFF), seed=3)
    logits = np.array([-math.inf, 0, -math.inf, 0, -math.inf], np.float32)
    assert {chain.sample(logits, []) for _ in range(100)} == {1, 3}


@given(some_logits, st.sampled_from([{}, {"typical_p": 0.5}, {"presence_penalty": 100.0}]))
def test_greedy_takes_the_likeliest_of_what_the_others_left(
    logits: Any, options: dict[str, Any]
) -> None:
    chain = Chain(SamplingParams(temperature=0, **options))
    token = chain.sample(logits, [])
    assert chain.is_argmax == ("typical_p" not in options and "presence_penalty" not in options)
    if "typical_p" not in options:
        assert token == int(logits.argmax())


def test_greedy_obeys_penalties_and_bias() -> None:
    logits = np.array([3.0, 2.9, 0.0], np.float32)
    assert Chain(SamplingParams(temperature=0, presence_penalty=1.0)).sample(logits, [0]) == 1
    biased = Chain(SamplingParams(temperature=0, logit_bias={2: 5.0}))
    assert biased.needs_logits
    assert biased.sample(logits, []) == 2
    assert logits.tolist() == pytest.approx([3.0, 2.9, 0.0]), "the model's array was written to"


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


def test_temperatures_near_zero_and_far_from_it() -> None:
    logits = np.array([10.0, 9.999, -10.0], np.float32)
    cold = Chain(SamplingParams(**OFF | {"temperature": 1e-300}), seed=0)
    assert {cold.sample(logits, []) for _ in range(50)} == {0}
    hot = Chain(SamplingParams(**OFF | {"temperature": 1e30}), seed=0)
    assert {hot.sample(logits, []) for _ in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unfit_logits_are_an_error(bad: float, temperature: float) -> None:
    chain = Chain(SamplingParams(temperature=temperature))
    with pytest.raises(LogitsError, match="largest logit is"):
        chain.sample(np.array([0.0, bad, 1.0], np.float32), [])


def test_banning_every_token_is_an_error() -> None:
    logits = np.zeros(2, np.float32)
    with pytest.raises(DeadEndError):
        Chain(SamplingParams()).sample(logits, [], banned=[0, 1])
    with pytest.raises(DeadEndError):
        Chain(SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})).sample(logits, [])
    assert logits.tolist() == [0, 0]


def test_forbidden_and_unfit_are_told_apart() -> None:
    chain = Chain(SamplingParams(logit_bias={1: -math.inf}))
    logits = np.array([0, 1, 2, 3], np.float32)
    assert chain.sample(logits, [], allowed=np.isin(range(4), [1, 2])) == 2
    for banned, allowed in [((2,), [1, 2]), ((), [1]), ((), [])]:
        with pytest.raises(DeadEndError):
            chain.sample(logits, [], banned, np.isin(range(4), allowed))
    # A bad logit is one even where the grammar forbids its token.
    with pytest.raises(LogitsError):
        chain.sample(np.array([math.nan, 1, 2, 3], np.float32), [], (), np.isin(range(4), 2))


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_what_is_not_allowed_is_as_if_it_were_not_there(share: float) -> None:
    random = np.random.default_rng(0)
    for seed in range(30):
        logits = _tenths(seed, 400)
        allowed = random.random(390) < share
        allowed[7] = True
        # The same logits in the same order with the others left out: indexes become ids.
        ids = np.flatnonzero(allowed)
        for options in (OFF, {}, {"typical_p": 0.7}, {"top_n_sigma": 1.0}, {"dynatemp_range": 0.5}):
            one, other = (Chain(SamplingParams(**options), seed=seed) for _ in range(2))
            assert one.sample(logits, [], allowed=allowed) == ids[other.sample(logits[ids], [])]


@given(some_logits, st.lists(st.integers(0, 299), unique=True), st.integers(0, 2**32))
def test_find_places_tokens_among_those_left(logits: Any, tokens: list[int], seed: int) -> None:
    candidates = Candidates(logits)
    left = np.random.default_rng(seed).permutation(len(logits))[: len(logits) // 2]
    candidates.keep(left, is_sorted=False)
    places, nth = candidates.find(tokens)
    found = dict(zip(np.array(tokens, int)[nth].tolist(), places.tolist(), strict=True))
    assert found == {
        token: left.tolist().index(token) for token in tokens if token in left.tolist()
    }


@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(1, 3100))
def test_top_ids_is_a_stable_sort(seed: int, n: int, k: int) -> None:
    logits = _tenths(seed, n)
    assert top_ids(logits, k).tolist() == np.argsort(-logits, kind="stable")[:k].tolist()


def test_top_ids_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal(50_001).astype(np.float32)
    logits[-1] = 10.0  # in the tail that fills no group
    for k in (1, 40, 97, 98, 1000):
        assert top_ids(logits, k).tolist() == np.argsort(-logits, kind="stable")[:k].tolist()


@given(some_logits)
def test_logprobs_are_the_models_own(logits: Any) -> None:
    expected = np.log(softmax(logits))
    got = token_logprob(logits, 0, 3)
    assert got.logprob == pytest.approx(expected[0], abs=1e-4)
    assert [id_ for id_, _ in got.top] == np.argsort(-logits, kind="stable")[:3].tolist()
    assert [p for _, p in got.top] == pytest.approx([expected[id_] for id_, _ in got.top], abs=1e-4)
