"""What kernels are checked by: the compiled ones pass, and one wrong element is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sites

from xpuc.schedules import Site
from xpuc.tuning.cases import cost, make
from xpuc.tuning.reference import error
from xpuc.tuning.results import Cost

TOLERANCE = 1e-5  # of schedules whose sums are of single precision
MIXED = [("Q4_K", 20, 256), ("Q6_K", 12, 256)]
SITES: dict[str, tuple[Site, int, int]] = {  # rows, depth
    "linear Q4_1": (sites.linear(2, [("Q4_1", 20, 160)]), 2, 0),
    "linear Q8_0, f32": (sites.linear("n", [("Q8_0", 20, 160)], "f32"), 5, 0),
    "linear F16": (sites.linear(1, [("F16", 20, 40)], "f32"), 1, 0),
    "head Q6_K": (sites.head_argmax("m", ("Q6_K", 300, 256)), 18, 0),
    "gate_up Q5_0": (sites.gate_up(1, [("Q5_0", 40, 64)] * 2, quantize=False), 1, 0),
}
SLOW_SITES: dict[str, tuple[Site, int, int]] = {
    "linear_group": (sites.linear("n", MIXED, bias=True), 19, 0),
    "linear_group, f32": (sites.linear(2, MIXED, "f32", bias=True), 2, 0),
    "linear IQ4_XS": (sites.linear(1, [("IQ4_XS", 20, 256)]), 1, 0),
    "linear Q3_K": (sites.linear(1, [("Q3_K", 20, 256)]), 1, 0),
    "gate_up gelu": (sites.gate_up("n", [("Q5_1", 64, 64)] * 2, "gelu_tanh"), 21, 0),
    "gate_up silu": (sites.gate_up(2, [("Q5_K", 64, 256), ("Q4_0", 64, 256)]), 2, 0),
    "decode": (sites.attention(3, (9, 3, 64), scale=0.125), 3, 300),
    "decode, window": (sites.attention(2, window=40, quantize=True), 2, 301),
    "prefill": (sites.attention("n", softcap=3.0, window=200), 37, 256),
    "decode, q8_0": (sites.attention(3, (8, 2, 64), "q8_0", window=200), 3, 300),
    "prefill, q8_0": (sites.attention("n", (4, 4, 32), "q8_0", softcap=3.0), 37, 256),
    "prefill, quantised": (sites.attention("n", kv_dtype="float32", quantize=True), 37, 0),
}
ALL = [
    *(pytest.param(*row, id=name) for name, row in SITES.items()),
    *(pytest.param(*row, id=name, marks=pytest.mark.slow) for name, row in SLOW_SITES.items()),
]


def wrong(array: np.ndarray, place: tuple[int, ...]) -> np.ndarray:
    """A copy with one element off: a hundredth of the largest, two steps, or the next id."""
    copy = array.copy()
    if array.dtype == np.int8:
        copy[place] += -2 if copy[place] > 0 else 2
    elif array.dtype == np.int32:
        copy[place] = copy[place] + 1 if copy[place] == 0 else copy[place] - 1
    else:
        copy[place] += np.abs(array).max() / 100
    return copy


@pytest.mark.parametrize(("where", "rows", "depth"), ALL)
def test_kernels_pass_and_one_wrong_element_does_not(where: Site, rows: int, depth: int) -> None:
    case = make(where, rows, depth=depth)
    outputs = sites.computed(where, case)
    assert error(where, case, outputs) <= 1e-6
    rng = np.random.default_rng(0)
    for i, array in enumerate(outputs):
        row = min(rows, 16) - 1
        axis = 1 if len(outputs) == 4 else 0
        place = [int(rng.integers(size)) for size in array.shape]
        place[axis] = row
        changed = [*outputs[:i], wrong(array, tuple(place)), *outputs[i + 1 :]]
        assert error(where, case, changed) > 10 * TOLERANCE, f"output {i}"


def test_a_row_past_the_first_sixteen_is_not_compared() -> None:
    where = sites.linear("n", [("Q8_0", 8, 32)])
    case = make(where, 20)
    outputs = sites.computed(where, case)
    for row, is_compared in ((15, True), (16, False)):
        changed = wrong(outputs[0], (row, 3))
        assert (error(where, case, [changed]) > TOLERANCE) == is_compared


def test_what_is_not_a_number_is_infinitely_wrong() -> None:
    where = sites.linear(1, [("Q8_0", 8, 32)])
    case = make(where, 1)
    (y,) = sites.computed(where, case)
    y[0, 2] = np.nan
    assert error(where, case, [y]) == math.inf
    quantised = sites.gate_up(1, [("Q8_0", 32, 32)] * 2)
    case = make(quantised, 1)
    shapes = [((1, 1, 32), np.int8), *(((1, 1, 2), np.float32),) * 2, ((1, 1), np.float32)]
    outputs = [np.zeros(shape, dtype) for shape, dtype in shapes]
    assert error(quantised, case, outputs) == pytest.approx(1)
    outputs[1][:] = np.inf
    assert error(quantised, case, outputs) == math.inf


@pytest.mark.parametrize("bad", [-1, 300])
def test_an_id_that_is_none_is_infinitely_wrong(bad: int) -> None:
    where = sites.head_argmax(1, ("Q8_0", 300, 32))
    assert error(where, make(where, 1), [np.array([bad], np.int32)]) == math.inf


def test_any_of_equally_good_ids_is_no_error() -> None:
    where = sites.head_argmax(1, ("Q8_0", 4, 32))
    case = make(where, 1)
    case.raw[0][2:] = case.raw[0][:2]  # every logit twice
    errors = [error(where, case, [np.array([i], np.int32)]) for i in range(4)]
    assert sorted(errors)[:2] == [0, 0]
    assert errors[:2] == errors[2:]
    assert max(errors) > 0.1


def test_cost_of_a_product() -> None:
    # Planes 16 x 2 blocks of 18 bytes; q8a 2 blocks x 2 rows of 52 bytes; f32 out.
    wanted = Cost(2, 16 * 2 * 18 + 2 * 2 * 52 + 2 * 16 * 4, 2 * 2 * 16 * 64)
    for rows in (2, "n"):
        assert cost(sites.linear(rows, [("Q4_0", 16, 64)]), 2) == wanted


@pytest.mark.parametrize(
    ("where", "rows", "depth", "read", "seen"),
    [
        (sites.attention(3), 3, 300, 900, 900),
        (sites.attention(3, window=40), 3, 300, 120, 120),
        (sites.attention(3, window=400), 3, 300, 900, 900),
        (sites.attention("n"), 10, 100, 110, 1055),
        (sites.attention("n", window=4), 10, 100, 13, 40),
        (sites.attention("n", window=4), 3, 0, 3, 6),
    ],
)
def test_cost_of_attention(where: Site, rows: int, depth: int, read: int, seen: int) -> None:
    # 4 heads of 16 columns in f32 in and out, 2 heads of keys and values in f16.
    n_bytes = read * 2 * 2 * 16 * 2 + 2 * rows * 64 * 4
    assert cost(where, rows, depth=depth) == Cost(rows, n_bytes, 2 * 2 * 64 * seen)
