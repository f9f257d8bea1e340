"""The measures themselves: against sums written out, and at their edges."""

from __future__ import annotations

import math

import compare
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

LOGITS = hnp.arrays(
    np.float32, (4, 12), elements=st.floats(-20, 20, width=32, allow_subnormal=False)
)


def logprobs_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array([probabilities]))


def test_log_softmax_of_large_logits():
    found = compare.log_softmax(np.array([[1e4, 1e4 + math.log(3.0)]]))
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75]])


def test_margin_is_the_gap_of_the_two_largest():
    assert compare.margins(np.array([[1.0, 5.0, 4.5], [2.0, 2.0, -9.0]])).tolist() == [0.5, 0.0]


def test_kl_full_written_out():
    p, q = logprobs_of(0.5, 0.5), logprobs_of(0.25, 0.75)
    expected = 0.5 * math.log(2.0) + 0.5 * math.log(0.5 / 0.75)
    assert compare.kl_full(p, q)[0] == pytest.approx(expected)


def test_kl_buckets_counts_the_rest():
    # Two named ids of 0.6 and 0.3, so 0.1 for all others; the candidate gives the others 0.2.
    p, q = logprobs_of(0.6, 0.3), logprobs_of(0.5, 0.3)
    expected = 0.6 * math.log(0.6 / 0.5) + 0.1 * math.log(0.1 / 0.2)
    assert compare.kl_buckets(p, q)[0] == pytest.approx(expected)


def test_kl_top10_takes_the_candidate_at_the_reference_ids():
    candidate = logprobs_of(0.1, 0.3, 0.1, 0.5)
    top = [[[3, math.log(0.6)], [1, math.log(0.3)]]]
    expected = 0.6 * math.log(0.6 / 0.5) + 0.1 * math.log(0.1 / 0.2)
    assert compare.kl_top10(top, candidate)[0] == pytest.approx(expected)


def test_kl_top10_refuses_a_row_too_few():
    with pytest.raises(AssertionError, match="1 rows against 2"):
        compare.kl_top10([[[0, -0.1]], [[0, -0.1]]], logprobs_of(0.9, 0.1))


def test_kl_of_a_rounded_top_10_that_sums_past_one():
    found = compare.kl_buckets(logprobs_of(0.7, 0.30001), logprobs_of(0.7, 0.3))
    assert np.isfinite(found).all()
    assert abs(found[0]) < 1e-4


@given(LOGITS, LOGITS)
def test_kl_is_not_negative_and_coarser_buckets_show_less(a, b):
    full = compare.kl_full(a, b)
    p, q = compare.log_softmax(a), compare.log_softmax(b)
    best = np.argsort(-p, axis=-1)[:, :10]
    top = [[(i, p[row, i]) for i in ids] for row, ids in enumerate(best)]
    coarse = compare.kl_top10(top, q)
    # The bucket's floor may hide up to LEAST of a probability, times a log of at most 40.
    assert (coarse >= -1e-6).all()
    assert (coarse <= full + 1e-6).all()


@given(LOGITS)
def test_kl_to_itself_is_zero_whatever_is_added(a):
    np.testing.assert_allclose(compare.kl_full(a, a + np.float32(3.0)), 0.0, atol=1e-5)


def test_agreement_reports_the_worst_margin():
    found = compare.agreement([1, 2, 3, 4], [0.1, 0.2, 0.9, 5.0], [1, 7, 8, 4])
    assert found == compare.Agreement(rows=4, agreed=2, worst_margin=0.9, worst_row=2)
    assert found.holds(0.91)
    assert not found.holds(0.9)


def test_agreement_with_no_difference_holds_at_any_margin():
    found = compare.agreement([1, 2], [0.0, 0.3], [1, 2])
    assert found.agreed == found.rows == 2
    assert found.holds(0.0)


def test_a_difference_at_a_tie_breaks_only_margin_zero():
    found = compare.agreement([1], [0.0], [2])
    assert found.holds(0.01)
    assert not found.holds(0.0)


def test_logit_agreement():
    found = compare.logit_agreement(
        np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[0.0, 1.0], [0, 9.0]])
    )
    assert (found.agreed, found.worst_row, found.worst_margin) == (1, 1, 2.0)


def test_relative_error():
    assert compare.relative_error([1.0, -4.0], [1.0, -3.0]) == 0.25
    assert compare.relative_error([1.0, -4.0], [1.0, float("nan")]) == float("inf")
    with pytest.raises(AssertionError, match=r"\(2,\) against \(1,\)"):
        compare.relative_error([1.0, 2.0], [1.0])


def test_forced_rows_predict_the_continuation():
    prompt, continuation = [5, 6, 7], [8, 9]
    read = compare.forced_ids(prompt, continuation)
    assert read == [5, 6, 7, 8]
    # A model that always predicts the id read plus one.
    every = np.eye(12)[np.array(read) + 1]
    assert compare.forced_rows(every, prompt).argmax(-1).tolist() == continuation
