"""Scoring: the log probabilities of given tokens, whatever the chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_model import FakeModel

from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine


def test_logprobs_are_those_of_scoring_the_same_tokens() -> None:
    engine = Engine(FakeModel())
    result = engine.generate([3, 4, 5], max_tokens=20, seed=9, logprobs=3)
    assert result.logprobs is not None
    scored = engine.score([3, 4, 5, *result.ids], top_k=3)
    assert [each.id for each in result.logprobs] == result.ids
    assert scored.positions[3:] == result.logprobs
    assert scored.positions[0].logprob is None
    logprobs = [each.logprob for each in scored.positions[1:]]
    assert scored.nll == pytest.approx(-np.mean(logprobs))  # type: ignore[arg-type]
    assert scored.perplexity == pytest.approx(math.exp(scored.nll))
    assert engine.kv.n_used == 0


@pytest.mark.parametrize("chunk", [None, 1, 3, 8])
def test_scores_do_not_depend_on_the_chunks(chunk: int | None) -> None:
    ids = list(range(40))
    expected = Engine(FakeModel(max_chunk=40, max_out_rows=40)).score(ids, top_k=2)
    assert Engine(FakeModel()).score(ids, top_k=2, chunk=chunk) == expected


def test_scoring_needs_free_blocks() -> None:
    engine = Engine(FakeModel(n_blocks=8))
    engine.add_request([1] * 12, temperature=0)
    engine.step()
    with pytest.raises(
        RequestError, match="24 tokens need more K/V than there is: 5 blocks are free"
    ):
        engine.score([1] * 24)
    with pytest.raises(RequestError, match="33 tokens; the context holds 32"):
        engine.score([1] * 33)
    with pytest.raises(RequestError, match="token 97 at place 1 is not in the vocabulary"):
        engine.score([1, 97])


def test_a_request_does_not_wait_for_ever_for_k_v_that_is_lent() -> None:
    engine = Engine(FakeModel(n_blocks=8))
    rows = engine.teacher_forced([1] * 30)
    next(rows)
    with pytest.raises(RequestError, match="all K/V is lent to a text"):
        engine.generate([1, 2], max_tokens=1)
    rows.close()  # type: ignore[attr-defined]
    assert not engine.has_work
    assert engine.generate([1, 2], max_tokens=1).error is None


def test_rows_that_other_steps_may_have_overwritten_are_not_given() -> None:
    engine = Engine(FakeModel())
    for other in (lambda: engine.generate([1], max_tokens=1), lambda: engine.score([1, 2])):
        rows = engine.teacher_forced(list(range(20)))
        assert next(rows)[0] == 0
        other()
        with pytest.raises(RequestError, match="made other steps since"):
            next(rows)
        assert engine.kv.n_used == 0
