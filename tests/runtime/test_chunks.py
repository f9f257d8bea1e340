"""The cost model learns what a step takes, and chunks keep to the budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from xpuc.runtime.chunks import ChunkPolicy
from xpuc.runtime.cost_model import CostModel, Work

Machine = Callable[[Work], float]
BUDGET_NS = 150e6


def affine(work: Work) -> float:
    rows = 0.3e6 * work.decode_rows + 1.2e6 * work.chunk_tokens
    return 20e6 + rows + 60 * work.attended


def roofline(work: Work) -> float:
    """Few rows wait for memory, some for a slow kernel, many run on a fast one."""
    n = work.decode_rows + work.chunk_tokens
    return max(22e6, 1.5e6 * n if n < 64 else 38e6 + 0.9e6 * n) + 80 * work.attended


def slow(work: Work) -> float:
    """Not even one token fits the budget."""
    return 200e6 + 8e6 * (work.decode_rows + work.chunk_tokens)


def mixed(
    machine: Machine, *, noise: float = 0.0, stalls: float = 0.0, n: int = 450
) -> list[tuple[int, int]]:
    """(chunk chosen, best chunk) of steps with 1 to 20 streams and a prompt in every third, after
    the first hundred. A stall takes ten times as long."""
    random_ = random.Random(1)
    policy, chosen = ChunkPolicy(), []
    for step in range(n):
        n_decoding, context = random_.choice([1, 1, 4, 8, 20]), random_.randrange(4000)
        work = decoding = Work(n_decoding, 0, n_decoding * context)
        if step % 3 == 0:
            size = policy.size(decoding, 2000, 600, context)
            work = decoding.with_chunk(size, context)
            if step > 100:
                chosen.append((size, best_chunk(machine, decoding, context)))
        ns = machine(work) * (1 + random_.gauss(0, noise))
        policy.cost.observe(work, 10 * ns if random_.random() < stalls else ns)
    return chosen


def best_chunk(machine: Machine, decoding: Work, start: int) -> int:
    low, high = 1, 512
    while low < high:
        middle = (low + high + 1) // 2
        if machine(decoding.with_chunk(middle, start)) <= BUDGET_NS:
            low = middle
        else:
            high = middle - 1
    return low


def test_the_largest_chunk_that_fits_is_found_exactly_on_a_linear_machine() -> None:
    assert all(abs(size - best) <= 1 for size, best in mixed(affine))


@pytest.mark.parametrize(
    ("machine", "noise", "stalls", "off"),
    [
        pytest.param(affine, 0.05, 0.0, 0.15, id="linear, noisy"),
        pytest.param(roofline, 0.0, 0.0, 0.15, id="roofline"),
        pytest.param(roofline, 0.05, 0.0, 0.20, id="roofline, noisy"),
        pytest.param(roofline, 0.1, 0.05, 0.35, id="roofline, noisy, stalls"),
    ],
)
def test_chunks_come_near_the_best(
    machine: Machine, noise: float, stalls: float, off: float
) -> None:
    for size, best in mixed(machine, noise=noise, stalls=stalls):
        assert (1 - off) * best - 2 <= size <= (1 + off) * best + 2


def test_where_nothing_fits_a_prompt_still_moves() -> None:
    assert {size for size, _ in mixed(slow)} == {1}


def test_one_stall_hardly_changes_a_prediction() -> None:
    model, work = CostModel(), Work(4, 64, 10_000)
    for _ in range(40):
        model.observe(work, 50e6)
    assert model.predict(work) == pytest.approx(50e6, rel=1e-3)
    model.observe(work, 5e9)
    model.observe(work, 1e3)
    assert model.predict(work) == pytest.approx(50e6, rel=0.15)


def test_a_machine_that_turns_slow_is_learned_again() -> None:
    model, work = CostModel(), Work(4, 0, 10_000)
    for _ in range(200):
        model.observe(work, 50e6)
    for _ in range(60):
        model.observe(work, 200e6)
    assert model.predict(work) == pytest.approx(200e6, rel=0.1)


def test_decoding_for_long_does_not_wash_out_what_chunks_take() -> None:
    model, random_ = CostModel(), random.Random(2)
    for _ in range(60):
        work = Work(1, 0, 100).with_chunk(random_.choice([32, 64, 128, 256]), 100)
        model.observe(work, affine(work))
    for n in range(5000):
        model.observe(Work(1 + n % 8, 0, 100 * n), affine(Work(1 + n % 8, 0, 100 * n)))
    work = Work(2, 0, 5000).with_chunk(128, 400)
    assert model.predict(work) == pytest.approx(affine(work), rel=0.05)


@pytest.mark.parametrize("slower", [2, 4, 8])
def test_after_a_bad_moment_large_chunks_are_tried_again(slower: int) -> None:
    policy, decoding, sizes = ChunkPolicy(), Work(1, 0, 1000), []
    best = best_chunk(affine, decoding, 1000)
    for step in range(200):
        sizes.append(policy.size(decoding, 2000, 600, 1000))
        work = decoding.with_chunk(sizes[-1], 1000)
        policy.cost.observe(work, affine(work) * (slower if 50 <= step < 70 else 1))
    assert sizes[49] == pytest.approx(best, abs=2)
    assert max(sizes[60:70]) < best / 2 + 16
    assert min(sizes[110:]) > 0.9 * best, "it stays with small chunks"


def test_more_work_is_never_predicted_to_take_less() -> None:
    model, random_ = CostModel(), random.Random(3)
    for _ in range(100):
        model.observe(Work(random_.randrange(9), 0, random_.randrange(9000)), random_.uniform(1, 9))
    assert model.predict(Work(1, 0, 0)) <= model.predict(Work(2, 0, 0))
    assert model.predict(Work(1, 0, 0)) <= model.predict(Work(1, 0, 1000))


@pytest.mark.parametrize(
    ("overhead", "expected"), [(0.0, 32), (2e6, 64), (50e6, 512)], ids=["none", "some", "much"]
)
def test_alone_a_prompt_is_read_in_the_smallest_chunks_that_are_fast(
    overhead: float, expected: int
) -> None:
    policy, sizes = ChunkPolicy(), []
    for _ in range(40):
        size = policy.size(Work(), 4000, 600, 0)
        sizes.append(size)
        policy.cost.observe(Work().with_chunk(size, 0), overhead + 1e6 * size)
    assert sorted(sizes[:5]) == [32, 64, 128, 256, 512], "each is tried once"
    assert set(sizes[5:]) == {expected}
    for _ in range(60):
        size = policy.size(Work(), 4000, 600, 0)
        sizes.append(size)
        policy.cost.observe(Work().with_chunk(size, 0), overhead + 1e6 * size)
    assert len(set(sizes[40:])) > 1, "the others are tried again, if rarely"


def test_a_short_prompt_is_no_place_to_try_sizes() -> None:
    policy, sizes, n_behind = ChunkPolicy(), [], 1000
    while n_behind:
        sizes.append(policy.size(Work(), n_behind, 600, 1000 - n_behind))
        policy.cost.observe(Work().with_chunk(sizes[-1], 0), 20e6 + 1e6 * sizes[-1])
        n_behind -= sizes[-1]
    assert sizes == [512, 488]


def test_an_unmeasured_machine_is_approached_in_steps() -> None:
    policy, decoding = ChunkPolicy(), Work(1, 0, 10)
    sizes = []
    for _ in range(5):
        sizes.append(policy.size(decoding, 2000, 600, 0))
        policy.cost.observe(decoding.with_chunk(sizes[-1], 0), 1e6)
    assert sizes == [32, 127, 255, 511, 512]


def test_what_planning_took_is_no_longer_there_for_the_chunk() -> None:
    policy, decoding = ChunkPolicy(), Work(1, 0, 10)
    for size in (64, 128, 200) * 5:
        work = decoding.with_chunk(size, 0)
        policy.cost.observe(work, affine(work))
    sizes = {}
    for spent_ms in (0, 50, 100, 149, 500):
        chunk = policy.size(decoding, 2000, 600, 0, spent_ms * 1_000_000)
        sizes[spent_ms] = chunk
        assert chunk == 1 or affine(decoding.with_chunk(chunk, 0)) <= BUDGET_NS - spent_ms * 1e6
        assert affine(decoding.with_chunk(chunk + 2, 0)) > BUDGET_NS - spent_ms * 1e6
    assert sizes[0] > sizes[50] > sizes[100] > sizes[149] == sizes[500] == 1
    assert ChunkPolicy(budget_ms=math.inf).size(decoding, 2000, 600, 0, 10**12) == 512


def test_without_a_budget_and_with_little_room() -> None:
    decoding = Work(3, 0, 300)
    assert ChunkPolicy(budget_ms=math.inf).size(decoding, 2000, 600, 0) == 512
    assert ChunkPolicy(16).size(Work(), 7, 16, 0) == 7
    assert ChunkPolicy(16).sizes == (16,)
    assert ChunkPolicy(100).sizes == (32, 64, 100)
    assert ChunkPolicy().size(decoding, 9, 0, 0) == 0


@pytest.mark.parametrize("machine", [affine, roofline, lambda work: 5e6])
def test_the_chunk_that_fits_is_the_largest_that_is_predicted_to(machine: Machine) -> None:
    model, random_ = CostModel(), random.Random(4)
    for _ in range(300):
        work = Work(random_.randrange(20), 0, random_.randrange(40_000))
        work = work.with_chunk(random_.choice([0, 1, 7, 64, 200, 512]), random_.randrange(4000))
        model.observe(work, machine(work))
    found = set()
    for _ in range(500):
        decoding, start = Work(random_.randrange(20), 0, 20_000), random_.randrange(4000)
        ns, most = random_.uniform(1e6, 6e8), random_.randrange(1, 700)
        sizes = range(1, most + 1)
        fits = [n for n in sizes if model.predict(decoding.with_chunk(n, start)) <= ns]
        assert model.fitting(ns, decoding, start, most) == max(fits, default=0)
        found.add((bool(fits), most in fits))
    assert len(found) >= 2
