"""The DRY penalty, against its definition and llama.cpp's example."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xpuc.runtime.dry import Breakers, dry_penalties, find_breakers
from xpuc.runtime.sampling_params import SamplingParams

# llama.cpp's own example: after a b c c b c y a b c, "c" would repeat 4 tokens, "y" 3, "b" 2.
REPETITION = [ord(letter) for letter in "abccbcyabc"]


def test_dry_costs_grow_with_the_repetition() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    costs = dry_penalties(REPETITION, params, {})
    assert costs == {ord("c"): 4.0, ord("y"): 2.0, ord("b"): 1.0}
    longer = SamplingParams(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    assert dry_penalties(REPETITION, longer, {}) == {ord("c"): 1.0, ord("y"): 0.5}


def test_dry_looks_no_further_than_the_last_breaker_or_last_n() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    a_breaks: Breakers = {ord("a"): [()]}  # two tokens follow it: a repetition counts two at most
    assert dry_penalties(REPETITION, params, a_breaks) == {
        ord("c"): 2.0, ord("y"): 2.0, ord("b"): 1.0
    }  # fmt: skip
    c_breaks: Breakers = {ord("c"): [()]}
    assert dry_penalties(REPETITION, params, c_breaks) == {}
    ab_breaks: Breakers = {ord("a"): [(ord("b"),)]}  # only "c" follows it
    assert dry_penalties(REPETITION, params, ab_breaks)[ord("c")] == 1.0
    recent = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1, dry_last_n=4)
    assert dry_penalties(REPETITION, recent, {}) == {}


def test_dry_never_penalises_a_breaker_and_never_overflows() -> None:
    params = SamplingParams(dry_multiplier=1e6, dry_allowed_length=1)
    same = dry_penalties([5] * 2000, params, {})
    assert same[5] == 1e30
    assert dry_penalties([8, 5, 8], params, {5: [()]}) == {}


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3))
def test_dry_is_the_longest_repeated_end(tokens: list[int], allowed: int) -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=allowed)
    longest: dict[int, int] = {}
    for end in range(1, len(tokens)):
        n = 0
        while n < end and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        longest[tokens[end]] = max(longest.get(tokens[end], 0), n)
    assert dry_penalties(tokens, params, {}) == {
        token: 2.0 ** (n - allowed)
        for token, n in longest.items()
        if n >= allowed and len(tokens) > allowed
    }


def test_breakers_are_found_inside_and_across_tokens() -> None:
    pieces = ["a", "x\ny", "say **", "*"]
    breakers = find_breakers(["\n", "***"], pieces, lambda text: [100 + len(text)])
    assert breakers == {1: [()], 2: [(102,), (101,)], 3: [(102,)]}
