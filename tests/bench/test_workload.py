"""The requests of a load: the same for a seed, mixed, and none too long."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from xpuc.bench.workload import workload


def test_a_seed_gives_the_same_requests_and_another_others() -> None:
    one, again, other = (
        workload(50, 3.0, n_vocab=97, longest=512, seed=seed) for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.parametrize("longest", [8, 64, 512])
def test_no_request_is_longer_than_the_context_and_ids_are_valid(longest: int) -> None:
    for each in workload(500, 3.0, n_vocab=97, longest=longest, seed=1):
        assert 1 <= len(each.prompt) < each.n_tokens < longest
        assert all(0 <= token < 97 for token in each.prompt)
        assert each.cancel_after is None or 1 <= each.cancel_after < each.max_tokens


def test_lengths_are_mixed_prefixes_shared_and_some_given_up() -> None:
    arrivals = workload(2000, 3.0, n_vocab=50_000, longest=512, seed=1)
    prompts = [len(each.prompt) for each in arrivals]
    answers = [each.max_tokens for each in arrivals]
    assert min(prompts) < 8 < 64 < 250 < max(prompts)
    assert min(answers) < 6 < 90 < max(answers)
    begins = Counter(each.prompt[:64] for each in arrivals if len(each.prompt) > 64)
    shared = sorted(begins.values())[-4:]
    assert shared[0] == 1, "four texts are shared, not three"
    assert sum(shared[1:]) / 2000 == pytest.approx(0.6, abs=0.05)
    assert sum(each.cancel_after is not None for each in arrivals) / 2000 == pytest.approx(
        0.1, abs=0.03
    )


def test_arrivals_are_poisson_or_all_at_once() -> None:
    times = [each.at_s for each in workload(4000, 5.0, n_vocab=97, longest=64, seed=1)]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.05)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)
    assert {each.at_s for each in workload(9, math.inf, n_vocab=97, longest=64, seed=1)} == {0.0}
