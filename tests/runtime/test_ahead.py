"""Steps queued before the one before them is read: the same answers, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
from fake_model import MODES, PIPELINED, FakeCodec, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.modes import Modes
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.speculation import Speculation

GREEDY: dict[str, Any] = {"temperature": 0}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]


def engine_of(
    *, codec: bool = False, records: list[StepRecord] | None = None, **sizes: Any
) -> Engine:
    model = FakeModel(**({"modes": PIPELINED} | sizes))
    engine = Engine(model, FakeCodec() if codec else None)
    if records is not None:
        engine.scheduler.on_step = records.append
    return engine


def n_ahead(engine: Engine) -> int:
    return engine.scheduler.counters.sums["n_ahead"]


def n_dropped(engine: Engine) -> int:
    return engine.scheduler.counters.sums["n_dropped"]


def served(engine: Engine) -> dict[int, Result]:
    """Results by request, of all that is asked."""
    results = {}
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                results[event.request.id] = event.result
    assert engine.kv.n_used == 0
    engine.kv.check()
    return results


def plain(prompt: Any, *, codec: bool = False, **options: Any) -> Result:
    return engine_of(codec=codec, modes=MODES).generate(prompt, **options)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_answers_of_a_batch_are_those_of_plain_steps(n: int) -> None:
    engine = engine_of(n_blocks=64)
    found = engine.generate(PROMPTS[:n], **GREEDY, max_tokens=30)
    assert [r.ids for r in found] == [plain(p, **GREEDY, max_tokens=30).ids for p in PROMPTS[:n]]
    # The prompt's step gives the first token; the last one is known to be, so nothing follows it.
    assert n_ahead(engine) == 28
    assert n_dropped(engine) == 0


@pytest.mark.parametrize(("modes", "n"), [(MODES, 1), (PIPELINED, 2)])
def test_a_step_is_queued_while_the_one_before_it_is_not_read(modes: Modes, n: int) -> None:
    """Two at a time: what a runner has memory for."""
    model = FakeModel(modes=modes)
    Engine(model).generate(PROMPTS[0], **GREEDY, max_tokens=9)
    assert model.n_queued == n


def test_an_end_of_text_drops_what_is_queued_after_it() -> None:
    """Token 0 ends a text; the answer's length is the model's own."""
    ends = 0
    for first in range(1, 12):
        engine = engine_of(codec=True)
        found = engine.generate([first, 3], **GREEDY, max_tokens=60)
        assert found.ids == plain([first, 3], codec=True, **GREEDY, max_tokens=60).ids
        assert engine.kv.n_used == 0
        if found.finish_reason == "stop" and found.timings.n_generated > 1:
            ends += 1
            assert n_dropped(engine) == 1
    assert ends > 2


def test_a_stop_string_drops_what_is_queued_after_it() -> None:
    whole = plain(PROMPTS[0], codec=True, **GREEDY, max_tokens=40)
    stop = whole.text[8:11]
    found = (engine := engine_of(codec=True)).generate(
        PROMPTS[0], **GREEDY, stop=stop, max_tokens=40
    )
    expected = plain(PROMPTS[0], codec=True, **GREEDY, stop=stop, max_tokens=40)
    assert (found.ids, found.text, found.stop) == (expected.ids, expected.text, stop)
    assert n_dropped(engine) == 1


def test_one_of_a_batch_ends_and_the_others_use_what_was_queued() -> None:
    """Their rows of that step are theirs; the rows of the one that ended are nobody's."""
    lengths = [7, 30, 18]
    engine = engine_of()
    stops = [
        plain(p, **GREEDY, max_tokens=n).ids[-1] for p, n in zip(PROMPTS, lengths, strict=True)
    ]
    requests = [
        engine.add_request(p, **GREEDY, max_tokens=40, stop_ids=[stop])
        for p, stop in zip(PROMPTS, stops, strict=True)
    ]
    results = served(engine)
    for prompt, stop, request in zip(PROMPTS, stops, requests, strict=True):
        expected = plain(prompt, **GREEDY, max_tokens=40, stop_ids=[stop])
        assert results[request.id].ids == expected.ids
        assert expected.finish_reason == "stop"
    assert n_dropped(engine) == 3


def test_a_newcomer_waits_for_the_step_that_is_queued_and_no_other() -> None:
    records: list[StepRecord] = []
    engine = engine_of(records=records)
    first = engine.add_request(PROMPTS[0], **GREEDY, max_tokens=20)
    for _ in range(4):
        engine.step()
    second = engine.add_request(PROMPTS[1], **GREEDY, max_tokens=20)
    engine.step()
    assert (records[-1].n_ahead, records[-1].n_admitted) == (1, 0)
    engine.step()
    assert (records[-1].n_ahead, records[-1].n_admitted) == (0, 1)
    results = served(engine)
    for prompt, request in ((PROMPTS[0], first), (PROMPTS[1], second)):
        assert results[request.id].ids == plain(prompt, **GREEDY, max_tokens=20).ids
    assert sum(record.n_ahead for record in records[-10:]) > 5, "then it goes on as before"


def test_those_who_wait_for_a_full_batch_hold_up_no_step() -> None:
    """They come in when one ends: in the next step if that was known, else in the one after it."""
    records: list[StepRecord] = []
    engine = engine_of(max_batch=2, buckets=(1, 2), records=records)
    requests = [engine.add_request(p, **GREEDY, max_tokens=20) for p in PROMPTS]
    results = served(engine)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert results[request.id].ids == plain(prompt, **GREEDY, max_tokens=20).ids
    assert [record.n_queue for record in records[:19]] == [1] * 19
    assert sum(record.n_ahead for record in records[:19]) > 15
    assert [record.step for record in records if record.n_admitted] == [1, 21]
    assert n_dropped(engine) == 0


def test_a_cancelled_request_leaves_its_row_and_its_blocks() -> None:
    engine = engine_of(n_blocks=16)
    first, second = (engine.add_request(p, **GREEDY, max_tokens=30) for p in PROMPTS[:2])
    for _ in range(5):
        engine.step()
    engine.cancel(first)
    third = engine.add_request(
        [30, 31, 32], **GREEDY, max_tokens=30
    )  # into the blocks of the first
    results = served(engine)
    assert results[first.id].finish_reason == "cancelled"
    assert results[first.id].ids == plain(PROMPTS[0], **GREEDY, max_tokens=5).ids
    assert results[second.id].ids == plain(PROMPTS[1], **GREEDY, max_tokens=30).ids
    assert results[third.id].ids == plain([30, 31, 32], **GREEDY, max_tokens=30).ids
    assert n_dropped(engine) == 1


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    whole = plain(PROMPTS[0], **GREEDY, max_tokens=20).ids
    other = plain(PROMPTS[1], **GREEDY, max_tokens=20).ids
    (bad,) = [token for token in whole[5:9] if token not in other][:1]
    engine = engine_of()
    engine.model.nan_tokens = {bad}  # type: ignore[attr-defined]
    first, second = (engine.add_request(p, **GREEDY, max_tokens=20) for p in PROMPTS[:2])
    results = served(engine)
    assert results[first.id].finish_reason == "error"
    assert results[first.id].ids == whole[: whole.index(bad) + 1]
    assert results[second.id].ids == other
    assert n_dropped(engine) == 1


def test_a_step_that_fails_takes_what_is_queued_after_it_along() -> None:
    engine = engine_of()
    engine.model.fails_at = {6}  # type: ignore[attr-defined]
    found = engine.generate(PROMPTS[0], **GREEDY, max_tokens=20)
    assert found.finish_reason == "error"
    assert found.ids == plain(PROMPTS[0], **GREEDY, max_tokens=6).ids
    assert engine.scheduler.counters.n_failed == 1
    again = engine.generate(PROMPTS[0], **GREEDY, max_tokens=20)
    assert again.ids == plain(PROMPTS[0], **GREEDY, max_tokens=20).ids


@pytest.mark.parametrize("n_fail", [1, 2])
def test_a_step_that_cannot_be_queued_ahead_is_made_in_its_turn(
    n_fail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it has its result all the same. A second failure is that of its own turn."""
    engine = engine_of()
    submit, failures = engine.model.submit, iter([True] * n_fail)

    def fail_ahead(batch: Any, **how: Any) -> Any:
        if n_ahead(engine) > 3 and next(failures, False):
            raise RuntimeError("out of pinned memory")
        return submit(batch, **how)

    monkeypatch.setattr(engine.model, "submit", fail_ahead)
    found = engine.generate(PROMPTS[0], **GREEDY, max_tokens=20)
    whole = plain(PROMPTS[0], **GREEDY, max_tokens=20)
    assert found.ids == whole.ids[: len(found.ids)]
    if n_fail == 1:
        assert (found.ids, n_ahead(engine)) == (whole.ids, 17)
    else:
        assert found.error == "the step failed: out of pinned memory"
        assert 3 < len(found.ids) < 20
    assert engine.kv.n_used == 0


def test_the_context_ends_an_answer_as_it_does_plainly() -> None:
    engine = engine_of(max_context=24)
    found = engine.generate(PROMPTS[0], **GREEDY)
    assert found.finish_reason == "length"
    assert len(found.ids) == 21
    assert n_dropped(engine) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "repeat_penalty": 1.3},
        {"temperature": 0, "min_tokens": 10, "stop_ids": [9]},
        {"temperature": 0, "n": 2},
    ],
    ids=str,
)
def test_what_takes_more_than_ids_is_not_queued_ahead(options: dict[str, Any]) -> None:
    engine = engine_of()
    found = engine.generate(PROMPTS[0], max_tokens=10, **options)
    expected = plain(PROMPTS[0], max_tokens=10, **options)
    assert [r.ids for r in (found, *found.others)] == [r.ids for r in (expected, *expected.others)]
    if options.get("n") != 2:  # forks go on by themselves once they share no block
        assert n_ahead(engine) == 0


def test_drafts_are_of_known_tokens() -> None:
    engine = Engine(FakeModel(modes=PIPELINED), speculation=Speculation(draft_max=3))
    assert engine.generate(PROMPTS[0], **GREEDY, max_tokens=20).ids == (
        plain(PROMPTS[0], **GREEDY, max_tokens=20).ids
    )
    assert n_ahead(engine) == 0


def test_who_uses_the_model_in_between_changes_nothing() -> None:
    engine = engine_of()
    chunks = engine.stream(PROMPTS[0], **GREEDY, max_tokens=20)
    ids = [next(chunks).id for _ in range(6)]
    assert engine._ahead is not None
    scored = engine.score([1, 2, 3, 4])
    ids += [chunk.id for chunk in chunks]
    assert ids == plain(PROMPTS[0], **GREEDY, max_tokens=20).ids
    assert scored.nll == engine_of(modes=MODES).score([1, 2, 3, 4]).nll


def test_nothing_is_left_queued_when_an_engine_closes() -> None:
    records: list[StepRecord] = []
    engine = engine_of(records=records)
    engine.add_request(PROMPTS[0], **GREEDY, max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.close()
    assert engine._ahead is None
    assert (records[-1].n_ahead, records[-1].n_dropped) == (1, 1)
    assert engine.kv.n_used == 0


def test_steps_ahead_teach_no_durations() -> None:
    engine = engine_of()
    engine.generate(PROMPTS[0], **GREEDY, max_tokens=20)
    assert engine.scheduler.chunks.cost.n_steps == 2, "the prompt, and the first step after it"


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 25), st.integers(0, 6), st.booleans()),
        min_size=1, max_size=5,
    ),
    st.integers(8, 40),
    st.sampled_from([(0,), (0, 6), (5,)]),
    st.sets(st.integers(0, 96), max_size=3),
)  # fmt: skip
@settings(deadline=None)
def test_any_mix_gives_what_plain_steps_give(
    mix: list[tuple[int, int, int, bool]],
    n_blocks: int,
    windows: tuple[int, ...],
    nan_tokens: set[int],
) -> None:
    """Requests (prompt, answer, steps before the next one, cancelled then) that end, come and yield
    at any time."""
    answers = []
    for modes in (MODES, PIPELINED):
        engine = engine_of(modes=modes, n_blocks=n_blocks, windows=windows, max_context=32)
        engine.model.nan_tokens = nan_tokens  # type: ignore[attr-defined]
        asked, results = [], {}
        for first, (n_prompt, n_answer, waits, is_cancelled) in enumerate(mix):
            prompt = [(first * 7 + i) % 90 for i in range(n_prompt)]
            asked.append(engine.add_request(prompt, **GREEDY, max_tokens=n_answer))
            for _ in range(waits):
                for event in engine.step():
                    if event.result is not None:
                        results[event.request.id] = event.result
            if is_cancelled:
                engine.cancel(asked[-1])
        results |= served(engine)
        answers.append([results[request.id] for request in asked])
    for expected, found in zip(*answers, strict=True):
        n = min(len(expected.ids), len(found.ids))
        assert found.ids[:n] == expected.ids[:n]
        if "cancelled" not in (expected.finish_reason, found.finish_reason):
            assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason)


def test_a_record_says_what_of_a_step_is_the_hosts_and_what_the_devices() -> None:
    records: list[StepRecord] = []
    engine_of(records=records).generate(PROMPTS[0], **GREEDY, max_tokens=8)
    assert sum(record.n_ahead for record in records) > 3
    for record in records:
        assert min(record.fill_ns, record.issue_ns) > 0
        if record.n_ahead:
            assert 0 < record.wait_ns <= record.model_ns
        else:
            spent = record.fill_ns + record.issue_ns + record.wait_ns
            assert spent <= record.model_ns
    assert records[0].wait_ns > 0, "of the prompt, which others may follow"
    records.clear()
    engine_of(records=records, modes=MODES).generate(PROMPTS[0], **GREEDY, max_tokens=3)
    assert all(record.issue_ns > 0 == record.wait_ns for record in records)
