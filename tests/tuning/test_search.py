"""The search for knobs: what it finds, what it asks for, and that it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.tuning.search import Search

Knobs = Mapping[str, int]
SPACE = {"ahead": (0, 256, 512, 1024, 2048), "unroll": (1, 2, 4), "tile": (8, 16, 32, 64)}
START = {"ahead": 1024, "unroll": 2, "tile": 64}


def run(search: Search, gain: Callable[[Knobs], float]) -> list[Knobs]:
    """Search to the end; what it asked for, in order."""
    asked: list[Knobs] = []
    for batch in search.batches():
        asked += batch
        for knobs in batch:
            search.tell(knobs, gain(knobs))
    return asked


def key(knobs: Knobs) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(knobs.items()))


@st.composite
def separable(draw: st.DrawFn) -> tuple[dict[str, dict[int, int]], Knobs]:
    """Powers of two that each value of each knob is worth, and a start."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    worth = {
        name: draw(st.dictionaries(st.integers(0, 9), st.integers(-4, 4), min_size=1, max_size=6))
        for name in names
    }
    return worth, {name: draw(st.sampled_from(sorted(values))) for name, values in worth.items()}


@settings(max_examples=50)
@given(separable())
def test_the_best_of_knobs_that_do_not_influence_each_other_is_found(
    drawn: tuple[dict[str, dict[int, int]], Knobs],
) -> None:
    worth, start = drawn

    def gain(knobs: Knobs) -> float:
        return 2.0 ** sum(worth[n][knobs[n]] - worth[n][start[n]] for n in worth)

    search = Search({name: sorted(values) for name, values in worth.items()}, start)
    asked = run(search, gain)
    best = 2.0 ** sum(max(values.values()) - values[start[n]] for n, values in worth.items())
    assert search.gain == gain(search.best) == best
    # Nothing twice, and the start not at all: its gain is 1.
    assert len({key(k) for k in [start, *asked]}) == 1 + len(asked)


@pytest.mark.parametrize(
    "start", [START, {"ahead": 0, "unroll": 4, "tile": 8}, {"ahead": 2048, "unroll": 1, "tile": 8}]
)
def test_knobs_that_influence_each_other_a_little_are_found_too(start: Knobs) -> None:
    def gain(knobs: Knobs) -> float:
        far, turns, tile = (SPACE[n].index(knobs[n]) for n in SPACE)
        # More rows a tile want weights asked for less far ahead.
        return 9.0 - (far - 2) ** 2 - (turns - 1) ** 2 - (tile - 1) ** 2 - 0.4 * far * tile

    search = Search(SPACE, start)
    asked = run(search, lambda knobs: gain(knobs) / gain(start))
    whole = [dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values())]
    assert search.best == max(whole, key=gain)
    assert len(asked) < len(whole) / 2


def test_it_ends_when_nothing_helps() -> None:
    search = Search(SPACE, START)
    asked = run(search, lambda _: 0.9)
    assert (search.best, search.gain) == (START, 1.0)
    assert len(asked) == sum(len(values) - 1 for values in SPACE.values())


def test_it_ends_though_every_measurement_is_better_than_the_one_before() -> None:
    rising = itertools.count(2)
    search = Search(SPACE, START)
    asked = run(search, lambda _: float(next(rising)))
    assert search.best == asked[-1]
    assert len(asked) <= 3 * sum(map(len, SPACE.values()))


def test_what_does_not_work_is_never_the_best() -> None:
    search = Search(SPACE, START)
    run(search, lambda knobs: 0.0 if knobs["unroll"] == 4 else 1.1 if knobs["ahead"] else 0.5)
    assert search.best["unroll"] != 4
    assert search.gain == 1.1


def test_gains_known_before_are_not_asked_for_again() -> None:
    def gain(knobs: Knobs) -> float:
        return 1.0 + 0.1 * (knobs["unroll"] == 4) + 0.2 * (knobs["ahead"] == 256)

    whole = Search(SPACE, START)
    asked = run(whole, gain)
    for stop in range(len(asked)):
        resumed = Search(SPACE, START)
        for knobs in asked[:stop]:
            resumed.tell(knobs, gain(knobs))
        again = run(resumed, gain)
        assert not {key(k) for k in again} & {key(k) for k in asked[:stop]}
        assert (resumed.best, resumed.gain) == (whole.best, whole.gain)


def test_an_incumbent_outside_of_the_space_is_where_it_starts() -> None:
    search = Search({"ahead": (0, 256)}, {"ahead": 777, "unroll": 2})
    asked = run(search, lambda knobs: 1.5 if knobs["ahead"] == 256 else 0.5)
    assert asked == [{"ahead": 0, "unroll": 2}, {"ahead": 256, "unroll": 2}]
    assert search.best == {"ahead": 256, "unroll": 2}
