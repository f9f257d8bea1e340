"""Kernels in turns, and what counts as faster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.tuning.timing import Times, has_drifted, in_turns, is_faster


class Scripted:
    """A kernel that takes `first` seconds when it is tried, then those of each turn."""

    def __init__(self, name: str, first: float, turns: list[float], log: list[tuple[str, int]]):
        self.name, self.script, self.log = name, iter([first, *turns]), log

    def seconds(self, repeat: int) -> list[float]:
        self.log.append((self.name, repeat))
        return [next(self.script)] * repeat


def scripted(first: float = 0.02, turns: int = 4) -> tuple[list[Scripted], list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    return [Scripted(name, first, [0.02] * turns, log) for name in "abc"], log


def test_turns_interleave_and_another_one_is_first_each_time() -> None:
    kernels, log = scripted()
    in_turns(kernels, 4)
    assert "".join(name for name, _ in log) == "abc" + "abc" + "bca" + "cab" + "abc"


@pytest.mark.parametrize(("once", "runs"), [(0.0101, 2), (1.0, 1), (1e-6, 200)])
def test_a_turn_is_as_many_runs_as_take_a_moment(once: float, runs: int) -> None:
    kernels, log = scripted(once)
    in_turns(kernels, 4)
    assert {repeat for _, repeat in log[:3]} == {3}  # to see how long it takes
    assert {repeat for _, repeat in log[3:]} == {runs}


@pytest.mark.parametrize(("once", "turns"), [(0.02, 40), (0.5, 4), (3.0, 3)])
def test_a_slow_kernel_has_fewer_turns_but_three(once: float, turns: int) -> None:
    log: list[tuple[str, int]] = []
    found = in_turns([Scripted("slow", once, [once] * 40, log)], 40)
    assert len(found[0].turns) == turns


def test_each_kernel_has_its_own_turns() -> None:
    log: list[tuple[str, int]] = []
    a = Scripted("a", 1.0, [1.0, 2.0, 3.0], log)
    b = Scripted("b", 1.0, [4.0, 5.0, 6.0], log)
    assert in_turns([a, b], 3) == [Times((1.0, 2.0, 3.0)), Times((4.0, 5.0, 6.0))]


def test_a_turn_is_the_median_of_its_runs() -> None:
    class Uneven:
        def seconds(self, repeat: int) -> list[float]:
            return [0.008, 0.009, 9.0][:repeat]

    assert in_turns([Uneven()], 2) == [Times((0.009, 0.009))]


def test_median_and_spread() -> None:
    times = Times((4.0, 1.0, 2.0, 5.0, 3.0))
    assert times.median == 3.0
    assert times.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Times((2.0, 2.0)).spread == 0.0


SAME = Times((1.0,) * 8)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((0.99,) * 8, True),
        ((0.996,) * 8, False),  # less than half a percent
        ((1.0,) * 8, False),
        ((0.9,) * 7 + (2.0,), True),  # one turn that something disturbed
        ((0.9,) * 6 + (1.0,) * 2, True),
        ((0.5,) * 5 + (1.0,) * 3, False),
        ((0.2,) + (1.0,) * 7, False),
    ],
)
def test_faster_is_what_is_faster_in_three_turns_of_four(
    turns: tuple[float, ...], expected: bool
) -> None:
    assert is_faster(Times(turns), SAME) is expected


def test_one_lucky_turn_that_moves_the_median_is_not_faster() -> None:
    even, lucky = (1.0, 1.0, 1.0, 0.9, 0.9, 0.9), (1.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.9)
    assert Times(lucky).median < 0.95 * Times((*even, 1.0)).median
    assert not is_faster(Times(lucky), Times((1.0,) * 7))


def test_turns_are_compared_with_those_beside_them() -> None:
    slow_machine = (1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0)
    assert is_faster(Times(tuple(0.98 * s for s in slow_machine)), Times(slow_machine))


SECONDS = st.lists(st.floats(1e-6, 1.0), min_size=7, max_size=7).map(tuple)


@settings(max_examples=50)
@given(SECONDS, SECONDS)
def test_of_two_kernels_one_at_most_is_faster(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    assert not (is_faster(Times(a), Times(b)) and is_faster(Times(b), Times(a)))


@pytest.mark.parametrize(
    ("factor", "drifted"), [(1.09, False), (1.11, True), (0.91, False), (0.89, True)]
)
def test_a_tenth_is_a_drift(factor: float, drifted: bool) -> None:
    assert has_drifted(Times((2.0 * factor,) * 7), 2.0) is drifted
