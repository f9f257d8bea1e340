"""Drafts in plans: when there are some, for whom, and what they may take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from fake_engine import carry_out, scheduler_of, sequence_of
from hypothesis import given
from hypothesis import strategies as st

from xpuc.errors import RequestError
from xpuc.runtime.cost_model import Work
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.plan import Plan
from xpuc.runtime.scheduler import Scheduler
from xpuc.runtime.sequence import Request, SamplingParams, Sequence, State
from xpuc.runtime.speculation import Drafter, Speculation, fair_shares


def drafting(draft_max: int = 3, *, max_rows: int = 8, **other: Any) -> Scheduler:
    drafter = Drafter(Speculation(draft_max, 1, 2), max_rows=max_rows)
    return scheduler_of(**({"drafter": drafter, "max_chunk": 32, "max_context": 64} | other))


def decoding(scheduler: Scheduler, n_prompts: Iterable[int], **params: Any) -> list[Sequence]:
    """Sequences that have said 0 four times, so that the next draft is of 0s, three if it may."""
    sequences = []
    for id_, n_prompt in enumerate(n_prompts):
        prompt = tuple(sequence_of(id_ + 1, n_prompt).tokens)
        sequences.append(Sequence(Request(id_, prompt, SamplingParams(**params))))
        scheduler.add(sequences[-1])
    drafter, scheduler.drafter = scheduler.drafter, None
    for _ in range(3):
        carry_out(scheduler, scheduler.plan())
    scheduler.drafter = drafter
    carry_out(scheduler, scheduler.plan())
    assert all(each.state is State.RUNNING for each in sequences)
    return sequences


def drafts_of(plan: Plan) -> list[tuple[int, ...]]:
    return [span.drafts for span in plan.spans]


def test_accepted_drafts_are_computed_and_found_by_others() -> None:
    scheduler = drafting(7)
    (sequence,) = decoding(scheduler, [3])
    assert (sequence.n_generated, sequence.n_accepted) == (5, 1), "the first draft is of one token"
    plan = scheduler.plan()
    assert drafts_of(plan) == [(0, 0, 0)]
    assert (plan.record.n_rows, plan.record.decode_tokens, plan.record.n_drafted) == (4, 1, 3)
    assert plan.work == Work(4, 0, 8 + 9 + 10 + 11)
    carry_out(scheduler, plan)
    assert (sequence.tokens[3:], sequence.n_pending) == ([0] * 9, 1)
    assert scheduler.kv.groups[0].pool.match(sequence.links) == sequence.blocks[0][:2]
    assert (sequence.n_drafted, sequence.n_accepted) == (4, 4)
    sums = scheduler.counters.sums
    assert (sums["n_drafted"], sums["n_accepted"]) == (4, 4)


def test_wrong_drafts_leave_nothing_behind() -> None:
    scheduler = drafting()
    (sequence,) = decoding(scheduler, [4])
    plan = scheduler.plan()
    assert drafts_of(plan) == [(0, 0, 0)]
    assert (sequence.n_computed, len(sequence.blocks[0]), sequence.epoch) == (8, 3, 0)
    carry_out(scheduler, plan, iter([0, 1]).__next__)
    assert sequence.tokens[-2:] == [0, 1]
    assert (sequence.n_computed, sequence.n_pending, len(sequence.blocks[0])) == (10, 1, 3)
    scheduler = drafting()
    (sequence,) = decoding(scheduler, [2])
    assert (sequence.n_computed, len(sequence.blocks[0])) == (6, 2)
    plan = scheduler.plan()
    assert len(sequence.blocks[0]) == 3, "the third draft is in a block of its own"
    carry_out(scheduler, plan, lambda: 1)
    assert (sequence.n_computed, len(sequence.blocks[0]), sequence.epoch) == (7, 2, 1)
    assert scheduler.kv.groups[0].pool.n_used == 2
    assert plan.record.n_accepted == 0
    scheduler.kv.groups[0].pool.check()


def test_nobody_drafts_while_a_prompt_is_behind() -> None:
    scheduler = drafting(max_chunk=8, n_blocks=20)
    decoding(scheduler, [3])
    scheduler.add(sequence_of(9, 12))
    plans = [scheduler.plan()]
    while plans[-1].record.prefill_tokens:
        carry_out(scheduler, plans[-1])
        plans.append(scheduler.plan())
    assert len(plans) == 3
    assert [any(drafts_of(plan)) for plan in plans] == [False, False, True]


def test_a_first_token_has_no_draft() -> None:
    scheduler = drafting()
    sequence = Sequence(Request(0, (5, 5, 5, 5, 5)))
    again = Sequence(Request(1, (5, 5, 5, 5, 5)))
    scheduler.add(sequence)
    carry_out(scheduler, scheduler.plan())
    scheduler.finish(sequence, "stop")
    scheduler.add(again)
    plan = scheduler.plan()
    assert (plan.record.decode_tokens, drafts_of(plan)) == (1, [()]), "its prefix is cached"


def test_drafts_take_the_rows_that_are_left_in_turn() -> None:
    scheduler = drafting(max_rows=5, n_blocks=40)
    decoding(scheduler, [3, 3, 3])
    seen = []
    for _ in range(3):
        plan = scheduler.plan()
        seen.append([len(each) for each in drafts_of(plan)])
        carry_out(scheduler, plan)
    assert sorted(seen) == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_no_row_is_left_in_a_full_batch_or_beyond_it() -> None:
    for max_rows in (2, 3):
        scheduler = drafting(max_rows=max_rows)
        decoding(scheduler, [3, 3, 3])
        assert drafts_of(scheduler.plan()) == [(), (), ()]


def test_drafts_take_free_blocks_only_and_give_them_back() -> None:
    scheduler = drafting(n_blocks=6)
    first, second, third = decoding(scheduler, [3, 3, 3], max_tokens=20)
    assert scheduler.kv.groups[0].pool.n_free == 0
    assert {(each.n_computed, len(each.blocks[0])) for each in (first, second, third)} == {(7, 2)}
    plan = scheduler.plan()
    assert drafts_of(plan) == [(), (), ()], "position 8 would be in a third block"
    assert plan.record.n_preempted == 0
    scheduler.end_step(plan, failed=True)
    scheduler.finish(third, "stop")
    plan = scheduler.plan()
    assert [len(each) for each in drafts_of(plan)] == [3, 3]
    carry_out(scheduler, plan, lambda: 1)
    assert scheduler.kv.groups[0].pool.n_free == 2
    scheduler.finish(second, "stop")
    scheduler.kv.groups[0].pool.allocate(3)  # one is left
    assert [len(each) for each in drafts_of(scheduler.plan())] in ([0], [1])


@pytest.mark.parametrize(
    ("params", "n_drafts"),
    [({}, 3), ({"draft_max": 2}, 2), ({"draft_max": 0}, 0), ({"draft_max": 9}, 3),
     ({"max_tokens": 6}, 0), ({"max_tokens": 8}, 2), ({"max_tokens": 9}, 3)],
)  # fmt: skip
def test_a_draft_ends_where_the_answer_does(params: dict[str, Any], n_drafts: int) -> None:
    scheduler = drafting()
    (sequence,) = decoding(scheduler, [3], **params)
    if sequence.n_generated == 4:  # it had no draft yet
        sequence.tokens.append(0)
        sequence.n_computed += 1
    assert sequence.n_generated == 5
    found = 0
    for _ in range(2):  # the first may be of one token
        plan = scheduler.plan()
        found = max(found, len(plan.spans[0].drafts))
        carry_out(scheduler, plan, lambda: 0)
        if params:
            break
    assert found == n_drafts


def test_no_draft_goes_beyond_the_context() -> None:
    scheduler = drafting(max_context=16)
    (sequence,) = decoding(scheduler, [6])
    while sequence.state is State.RUNNING:
        plan = scheduler.plan()
        assert plan.spans[0].start + 1 + len(plan.spans[0].drafts) < 16
        carry_out(scheduler, plan)
    assert len(sequence.tokens) == 16


def test_a_sequence_that_ends_within_its_drafts_is_left_alone() -> None:
    scheduler = drafting()
    (sequence,) = decoding(scheduler, [3])
    plan = scheduler.plan()
    scheduler.complete(plan)
    sequence.tokens.append(0)
    scheduler.accept(plan, plan.spans[0])
    scheduler.finish(sequence, "stop")
    scheduler.end_step(plan)
    assert scheduler.kv.groups[0].pool.n_used == 0
    assert len(scheduler.kv.groups[0].pool.match(sequence.links)) == 2
    scheduler.kv.groups[0].pool.check()


def test_the_vllm_policy_drafts_too() -> None:
    scheduler = drafting(policy="vllm")
    decoding(scheduler, [3, 4])
    assert [len(each) for each in drafts_of(scheduler.plan())] == [3, 3]


def test_without_a_drafter_a_record_is_as_ever() -> None:
    records: list[StepRecord] = []
    scheduler = scheduler_of(on_step=records.append)
    scheduler.add(sequence_of(0, 1))
    for _ in range(6):
        carry_out(scheduler, scheduler.plan())
    assert {(each.n_drafted, each.draft_ns, each.n_rows) for each in records} == {(0, 0, 1)}


wants = st.lists(st.integers(0, 7), min_size=1, max_size=8)


@given(wants, st.integers(0, 40), st.integers(0, 20))
def test_shares_are_fair(wanted: list[int], n: int, first: int) -> None:
    shares = fair_shares(wanted, n, first)
    assert sum(shares) == min(n, sum(wanted))
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    short = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert not short or max(shares) <= min(short) + 1, "one has two more than one that wants more"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_max": -1}, "draft_max is -1"),
        ({"draft_max": 2.5}, "draft_max is 2.5"),
        ({"ngram_min": 0}, "ngram_min is 0"),
        ({"ngram_min": 5}, "ngram_min is 5, above ngram_max 4"),
        ({"ngram_max": True}, "ngram_max is True"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        Speculation(**options)
    assert refused.value.message == message


def test_a_model_of_one_row_is_refused_where_drafts_are_wanted() -> None:
    Drafter(Speculation(), max_rows=1)
    with pytest.raises(RequestError, match="decodes one row a step"):
        Drafter(Speculation(1), max_rows=1)
