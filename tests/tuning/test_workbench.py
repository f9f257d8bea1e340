"""Candidates checked and compared on one board."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fake_machine
import numpy as np
import pytest
from fake_machine import FakeBoard, FakeBuilder, Machine, task

from xpuc.errors import XpucError
from xpuc.tuning.candidates import Candidate
from xpuc.tuning.kernels import Board
from xpuc.tuning.roofs import RoofKernels
from xpuc.tuning.workbench import Workbench, _same

ROWS = (16, 128)
INCUMBENT = {"near": 0, "wide": 0}


def seconds(size: int, knobs: fake_machine.Knobs, rows: int) -> float:
    """Near knobs are twice as fast with few rows, and slower with many."""
    gain = 1 + knobs["near"] * (1.0 if rows == 16 else -0.1)
    return 1e-3 * rows / gain / (1 + knobs["wide"])


class Bench:
    """A workbench and what makes candidates for it."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_machine.use(monkeypatch, machine)
        self.task = task(16, rows=ROWS)
        self.builder = FakeBuilder(machine, Path())
        board = cast(Board, FakeBoard(machine, 10**9))
        roofs = fake_machine.FakeRoofKernels(board, Path(), cast(Any, None))
        self.bench = Workbench(
            board,
            fake_machine.job_of(self.task),
            self.candidate(**INCUMBENT),
            cast(RoofKernels, roofs),
        )

    def candidate(self, **knobs: int) -> Candidate:
        (made,) = self.builder.build(self.task, [knobs])
        return made


MakeBench = Callable[[Machine], Bench]


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    return lambda machine: Bench(machine, monkeypatch)


def test_the_baseline_has_a_row_for_each_number_of_rows(make_bench: MakeBench) -> None:
    bench = make_bench(Machine(seconds, error=2e-7)).bench
    assert [(m.rows, m.us, m.default_us) for m in bench.baseline] == [
        (16, 16e3, 16e3), (128, 128e3, 128e3)
    ]  # fmt: skip
    assert bench.error == 2e-7
    assert bench.roofs.bytes_s == 20e9
    for m, cost in zip(bench.baseline, bench.job.costs, strict=True):
        assert m.of_roof == pytest.approx(cost.n_bytes / 20e9 / (m.us * 1e-6), abs=1e-3)


def test_an_incumbent_that_differs_from_the_reference_is_refused(make_bench: MakeBench) -> None:
    with pytest.raises(XpucError, match=r"differs from the reference by 1\.0e-02") as caught:
        make_bench(Machine(seconds, error=0.01))
    assert caught.value.hint


def test_a_candidate_is_faster_if_it_is_with_every_number_of_rows(make_bench: MakeBench) -> None:
    made = make_bench(Machine(seconds))
    wide = made.bench.compare(made.candidate(near=0, wide=1))
    assert (wide.is_faster, wide.is_right, wide.discarded) == (True, True, 0)
    assert [m.default_us / m.us for m in wide.measured] == pytest.approx([2.0, 2.0])
    near = made.bench.compare(made.candidate(near=1, wide=0))
    assert (near.is_faster, near.is_right) == (False, True)
    assert [m.default_us / m.us for m in near.measured] == pytest.approx([2.0, 0.9], rel=1e-3)


def test_a_candidate_with_another_result_is_not_timed(make_bench: MakeBench) -> None:
    made = make_bench(Machine(seconds, wrong=lambda knobs: knobs["wide"] == 1))
    compared = made.bench.compare(made.candidate(near=0, wide=1))
    assert (compared.is_right, compared.is_faster, compared.measured) == (False, False, ())


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0], [np.nextafter(np.float32(1), np.float32(2))], False),
        ([0.0], [-0.0], False),
    ],
)
def test_results_are_compared_by_their_bits(a: list[float], b: list[float], same: bool) -> None:
    assert _same([np.float32(a)], [np.float32(b)]) is same


def test_the_best_is_confirmed_beside_the_incumbent_and_beside_the_defaults(
    make_bench: MakeBench,
) -> None:
    made = make_bench(Machine(seconds))
    default = made.candidate(near=0, wide=2)  # the incumbent is another
    beside, plain = made.bench.confirm(made.candidate(near=0, wide=1), default)
    assert (beside.is_faster, plain.is_faster, beside.is_right) == (True, False, True)
    for compared, gain in ((beside, 2.0), (plain, 2 / 3)):
        gains = [m.default_us / m.us for m in compared.measured]
        assert gains == pytest.approx([gain] * len(ROWS), rel=1e-3)
    beside, _ = made.bench.confirm(made.candidate(near=1, wide=0), default)
    assert not beside.is_faster  # with many rows


# --- a machine that changes under a session ---


def test_a_moment_in_which_the_machine_is_slower_is_measured_again(make_bench: MakeBench) -> None:
    slow = SimpleNamespace(turns=0)

    def slower() -> float:
        slow.turns -= 1
        return 1.5 if slow.turns >= 0 else 1.0

    made = make_bench(Machine(seconds, slower=slower))
    slow.turns = 2 * (1 + 7)  # one comparison of two kernels: a try of each, and their turns
    compared = made.bench.compare(made.candidate(near=0, wide=1))
    assert compared.discarded == 1
    assert [m.default_us for m in compared.measured] == [16e3, 128e3]
    assert compared.is_faster


def test_a_machine_that_stays_slower_is_what_there_is_by_then(make_bench: MakeBench) -> None:
    slow = SimpleNamespace(by=1.0)
    made = make_bench(Machine(seconds, slower=lambda: float(slow.by)))
    slow.by = 1.5
    candidate = made.candidate(near=0, wide=1)
    first = made.bench.compare(candidate)
    assert first.discarded == 2 * len(ROWS)  # the third measurement of each counts
    assert [m.default_us for m in first.measured] == pytest.approx([24e3, 192e3])
    assert first.is_faster
    assert made.bench.compare(candidate).discarded == 0


def test_a_small_change_is_none(make_bench: MakeBench) -> None:
    slow = SimpleNamespace(by=1.0)
    made = make_bench(Machine(seconds, slower=lambda: float(slow.by)))
    slow.by = 1.08
    assert made.bench.compare(made.candidate(near=0, wide=1)).discarded == 0
