"""Perplexity in windows against its definition, on logits that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xpuc.errors import RequestError
from xpuc.runtime.perplexity import perplexity

N_VOCAB = 7


def logits(ids, position):
    """Of the token after ids[: position + 1]: a function of all of them."""
    return (
        np.random.default_rng([position, *ids[: position + 1]])
        .standard_normal(N_VOCAB)
        .astype("f4")
    )


def read(ids):
    return ((i, logits(ids, i)) for i in range(len(ids)))


def nll(ids, position):
    row = logits(ids, position).astype("f8")
    return math.log(np.exp(row).sum()) - row[ids[position + 1]]


def test_the_second_half_of_each_window_is_scored_from_that_window_alone():
    ids = np.random.default_rng(0).integers(0, N_VOCAB, 21).tolist()
    found = perplexity(read, ids, 8)
    expected = [[nll(ids[i : i + 8], p) for p in (4, 5, 6)] for i in (0, 8)]
    assert np.allclose(found.nll, expected, atol=1e-6)
    assert found.n_scored == 6
    assert found.value == pytest.approx(math.exp(np.mean(expected)))
    assert found.error == pytest.approx(found.value * np.std(expected, ddof=1) / math.sqrt(6))


def test_a_begin_token_takes_the_first_place_and_windows_can_be_fewer():
    ids = np.random.default_rng(1).integers(1, N_VOCAB, 30).tolist()
    found = perplexity(read, ids, 10, most=2, bos_id=0)
    window = [0, *ids[11:20]]
    assert np.allclose(found.nll[1], [nll(window, p) for p in (5, 6, 7, 8)], atol=1e-6)
    assert len(found.nll) == 2


def test_a_text_that_fills_no_window_is_refused():
    with pytest.raises(RequestError, match="7 tokens, fewer than a window of 8"):
        perplexity(read, [1] * 7, 8)
