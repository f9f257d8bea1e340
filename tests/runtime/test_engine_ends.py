"""How a request ends: by length, a token, a string, a cancel, or an error of its own."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_model import FakeCodec, FakeModel, alone, engine_of

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch, Result
from xpuc.runtime.engine import Engine
from xpuc.runtime.sequence import Sequence


def test_length_ends() -> None:
    engine = engine_of(max_context=24)
    by_max = engine.generate([1, 2, 3], temperature=0, max_tokens=4)
    assert (len(by_max.ids), by_max.finish_reason) == (4, "length")
    by_context = engine.generate([1, 2, 3], temperature=0)
    assert (len(by_context.ids), by_context.finish_reason) == (21, "length")
    by_pool = engine_of(n_blocks=3, block_tokens=4).generate([1, 2, 3], temperature=0)
    assert (len(by_pool.ids), by_pool.finish_reason) == (9, "length")


def ends_with_token(engine: Engine, at: int, **options: Any) -> tuple[list[int], int]:
    """What comes without a stop, and a token of it that first comes at `at` or later."""
    ids = engine.generate([3, 4], temperature=0, max_tokens=30, **options).ids
    return ids, next(i for i in range(at, 30) if ids.index(ids[i]) == i)


def test_stop_ids_end_it_and_stand_in_ids_but_not_in_text() -> None:
    engine = engine_of(FakeCodec())
    ids, at = ends_with_token(engine, 6, ignore_eos=True)
    stopped = engine.generate([3, 4], temperature=0, ignore_eos=True, stop_ids=(ids[at],))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == ids[: at + 1]
    assert stopped.text == FakeCodec().decode(ids[:at])


def test_an_end_token_ends_it_unless_ignored() -> None:
    codec = FakeCodec()
    codec.eog_ids = frozenset()
    ids, at = ends_with_token(engine_of(codec), 6)
    codec.eog_ids = frozenset({ids[at]})
    engine = engine_of(codec)
    stopped = engine.generate([3, 4], temperature=0)
    assert (stopped.ids, stopped.finish_reason) == (ids[: at + 1], "stop")
    longer = engine.generate([3, 4], temperature=0, max_tokens=30, ignore_eos=True)
    assert longer.ids[:at] == ids[:at]
    assert longer.finish_reason == "length"
    assert ids[at] not in longer.ids, "as in llama.cpp it is not chosen at all"


def test_min_tokens_keeps_ends_from_being_chosen() -> None:
    engine = engine_of(FakeCodec())
    ids, at = ends_with_token(engine, 6, ignore_eos=True)
    options: dict[str, Any] = {
        "temperature": 0,
        "ignore_eos": True,
        "stop_ids": (ids[at],),
        "max_tokens": 40,
    }
    longer = engine.generate([3, 4], min_tokens=at + 5, **options)
    assert longer.ids[:at] == ids[:at]
    assert ids[at] not in longer.ids[: at + 5]
    assert len(longer.ids) >= at + 5


def test_a_stop_string_across_tokens_cuts_the_text() -> None:
    engine = engine_of(FakeCodec())
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = engine.generate([3, 4], **options)
    pieces = FakeCodec().pieces(whole.ids)
    stop = (pieces[7] + pieces[8] + pieces[9])[-3:]
    end = whole.text.index(stop)
    stopped = engine.generate([3, 4], stop=("never", stop), **options)
    assert (stopped.text, stopped.finish_reason) == (whole.text[:end], "stop")
    assert stopped.stop == stop
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert len(FakeCodec().decode(stopped.ids)) >= end + len(stop)
    begun = engine.generate([3, 4], stop=whole.text[-2:] + "never", **options)
    assert (begun.text, begun.finish_reason, begun.stop) == (whole.text, "length", None)
    late = engine.generate([3, 4], stop=stop, min_tokens=len(stopped.ids) + 1, **options)
    assert late.text.startswith(whole.text[: end + len(stop)])


@pytest.mark.parametrize("n_steps", [0, 1, 4])
def test_cancel_takes_effect_with_the_next_step(n_steps: int) -> None:
    engine = engine_of(max_batch=1)
    first = engine.add_request([1] * 20, temperature=0, max_tokens=30)
    second = engine.add_request([2], temperature=0, max_tokens=3)
    events = [event for _ in range(n_steps) for event in engine.step()]
    engine.cancel(first)
    engine.cancel(first)
    events += engine.step()
    last = next(event for event in events if event.request is first and event.result)
    assert last.chunk.finish_reason == last.result.finish_reason == "cancelled"  # type: ignore
    assert len(last.result.ids) == max(n_steps - 1, 0)  # type: ignore[union-attr]
    while engine.has_work:
        events += engine.step()
    assert [e.result.finish_reason for e in events if e.request is second and e.result] == [
        "length"
    ]
    engine.cancel(first)
    assert not engine.step()


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    engine = engine_of(max_batch=2)
    assert isinstance(engine.model, FakeModel)
    engine.model.fails_at = {3}
    results = engine.generate([[1], [2], [3]], temperature=0, max_tokens=8)
    assert [each.finish_reason for each in results] == ["error", "error", "length"]
    assert results[0].error == "the step failed: kernel launch failed"
    assert results[0].hint is None, "nothing that the request could do"
    assert [len(each.ids) for each in results] == [3, 3, 8]
    assert results[2].ids == alone([3], temperature=0, max_tokens=8).ids
    assert engine.kv.n_used == 0


def test_a_step_that_fails_without_a_word_is_told_by_its_kind() -> None:
    engine = engine_of()
    engine.model.run = Mock(side_effect=MemoryError())  # type: ignore[method-assign]
    result = engine.generate([1, 2], max_tokens=2)
    assert result.error == "the step failed: MemoryError()"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_fail_that_request_only(temperature: float) -> None:
    engine = engine_of()
    assert isinstance(engine.model, FakeModel)
    engine.model.nan_tokens = {96}
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 4}
    good, bad = engine.generate([[3, 4], [3, 96]], **options, logit_bias={96: -math.inf})
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.error.startswith("the logits after 2 tokens are unfit")
    assert bad.hint is not None
    plain = engine.generate([[3, 4], [3, 96]], temperature=0, max_tokens=4)
    assert plain[1].error == "the logits after 2 tokens are unfit: none is the largest"


def test_the_engine_may_say_where_bad_logits_come_from() -> None:
    engine = engine_of()
    assert isinstance(engine.model, FakeModel)
    engine.model.nan_tokens = {96}
    asked: list[list[int]] = []
    engine.on_bad_logits = lambda sequence: asked.append(list(sequence.tokens)) or "layer 3"
    for options in ({"temperature": 0}, {"seed": 1, "logit_bias": {96: -math.inf}}):
        bad, good = engine.generate([[3, 96], [3, 4]], max_tokens=2, **options)
        assert good.error is None
        assert bad.error is not None
        assert bad.error.startswith("the logits after 2 tokens are unfit: ")
        assert bad.error.endswith("; layer 3")
    assert asked == [[3, 96]] * 2


def test_who_says_it_may_run_the_model_and_may_fail() -> None:
    """Results of the step that are not read yet are the others' all the same."""
    engine = engine_of()
    model, run = engine.model, engine.model.run
    memory = np.zeros((4, model.n_vocab), np.float32)

    def into_memory(batch: Batch, *, tail: Tail) -> Result:
        rows = run(batch, tail=tail)
        memory[: len(rows)] = rows
        return memory[: len(rows)]

    def look(sequence: Sequence) -> str:
        memory[:] = 0
        raise RuntimeError("out of order")

    model.run = into_memory  # type: ignore[method-assign]
    model.nan_tokens = {96}  # type: ignore[attr-defined]
    engine.on_bad_logits = look
    options: dict[str, Any] = {"logprobs": 0, "temperature": 0, "max_tokens": 1}
    bad, good = engine.generate([[3, 96], [3, 4]], **options)
    assert bad.error is not None
    assert bad.error.endswith("; where they come from is not known (out of order)")
    assert good.ids == alone([3, 4], **options).ids
