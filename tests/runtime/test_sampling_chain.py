"""The chain of samplers: its order, its draws, and what ends it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from allocations import of_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import NAMED, OFF, candidates_of, draw_of, some_logits, tenths, top_ids

from xpuc.runtime.candidates import Candidates
from xpuc.runtime.logprobs import token_logprob
from xpuc.runtime.sampler import SAMPLERS, Chain, DeadEndError, LogitsError
from xpuc.runtime.sampling_params import DEFAULT_ORDER, SamplingParams

# The example ChainOrder of "Reading inference engine codebases": six candidates, and what it prints
# after each sampler.
CHAIN_ORDER = [2.0, 1.5, 0.3, 3.1, -1.0, 2.8]
DEFAULT_STEPS = """\
top_k [3:0.439, 5:0.326, 0:0.146, 1:0.089]
top_p [3:0.482, 5:0.357, 0:0.161]
min_p [3:0.482, 5:0.357, 0:0.161]
temperature [3:0.410, 5:0.353, 0:0.237]"""
TEMPERATURE_FIRST_STEPS = """\
temperature [0:0.177, 1:0.138, 2:0.076, 3:0.307, 4:0.039, 5:0.264]
top_k [3:0.346, 5:0.298, 0:0.200, 1:0.156]
top_p [3:0.346, 5:0.298, 0:0.200, 1:0.156]
min_p [3:0.346, 5:0.298, 0:0.200, 1:0.156]"""


@pytest.mark.parametrize("steps", [DEFAULT_STEPS, TEMPERATURE_FIRST_STEPS])
def test_chain_order_golden(steps: str) -> None:
    candidates = candidates_of(CHAIN_ORDER)
    draw = draw_of(top_k=4, top_p=0.90, min_p=0.20, temperature=2.0)
    for line in steps.splitlines():
        name, _, shown = line.partition(" ")
        NAMED[name].apply(candidates, draw)
        left = zip(candidates.ids.tolist(), candidates.probabilities().tolist(), strict=True)
        assert f"[{', '.join(f'{id_}:{p:.3f}' for id_, p in left)}]" == shown, name


@given(some_logits, st.integers(1, 310), st.floats(0.001, 1.0))
def test_where_order_does_not_matter(logits: Any, k: int, p: float) -> None:
    """top_k and min_p keep what each of them keeps; top_p after them sees less, so it keeps less or
    the same; a temperature at the end keeps all."""
    draw = draw_of(top_k=k, min_p=p, top_p=0.8, temperature=1.7)
    kept = {}
    for order in ("top_k;min_p", "min_p;top_k", "top_k;top_p", "top_p;top_k", "top_k;temperature"):
        candidates = candidates_of(logits)
        for name in order.split(";"):
            NAMED[name].apply(candidates, draw)
        kept[order] = set(candidates.ids.tolist())
    assert kept["top_k;min_p"] == kept["min_p;top_k"]
    assert kept["top_k;top_p"] <= kept["top_p;top_k"]
    assert kept["top_k;temperature"] == set(top_ids(logits, k))


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
    assert biased.tail == "logits"
    assert biased.sample(logits, []) == 2
    assert logits.tolist() == pytest.approx([3.0, 2.9, 0.0]), "the model's array was written to"


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
        logits = tenths(seed, 400)
        allowed = random.random(390) < share
        allowed[7] = True
        # The same logits in the same order with the others left out: indexes become ids.
        ids = np.flatnonzero(allowed)
        for options in (OFF, {}, {"typical_p": 0.7}, {"top_n_sigma": 1.0}, {"dynatemp_range": 0.5}):
            one, other = (Chain(SamplingParams(**options), seed=seed) for _ in range(2))
            assert one.sample(logits, [], allowed=allowed) == ids[other.sample(logits[ids], [])]


PENALTIES = {"repeat_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
# What of numpy's has to be made: what it compares or counts, sorts, and finds among many.
MADE: list[tuple[dict[str, Any], int]] = [
    ({}, 0),
    ({"min_p": 0.3, "top_p": 0.5, "min_keep": 20}, 0),
    (PENALTIES, 0),
    (PENALTIES | {"penalty_last_n": -1}, 5),
    (PENALTIES | {"temperature": 0}, 0),
    ({"temperature": 0}, 0),
    ({"logit_bias": {3: 1.0}}, 2),
    ({"top_k": 0}, 15),
    ({"top_k": 300}, 15),
]


@pytest.mark.parametrize("n_vocab", [97, 1000, 50_000])
@pytest.mark.parametrize(("options", "most"), MADE)
def test_what_arrays_a_token_makes(options: dict[str, Any], most: int, n_vocab: int) -> None:
    random = np.random.default_rng(0)
    rows = list((4 * random.standard_normal((12, n_vocab))).astype(np.float32))
    tokens = random.integers(0, n_vocab, 400).tolist()
    chain = Chain(SamplingParams(**options), seed=0)
    for row in rows:  # which a model gives again and again
        chain.sample(row, tokens)
    with of_arrays() as arrays:
        for row in rows:
            chain.sample(row, tokens)
    assert sum(arrays.values()) <= most * len(rows), arrays


def test_log_probabilities_of_a_token_make_no_arrays() -> None:
    logits = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    candidates = Candidates()
    token_logprob(candidates, logits, 0, 20)
    with of_arrays() as arrays:
        token_logprob(candidates, logits, 0, 20)
    assert not arrays
