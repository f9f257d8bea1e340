"""Continuous batching: who runs, who yields, who is refused."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import QUEUE, FakeEngine, carry_out, kv_of, scheduler_of, sequence_of

from xpuc.errors import RequestError
from xpuc.runtime.chunks import ChunkPolicy
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.scheduler import Plan, Scheduler, Span
from xpuc.runtime.sequence import Request, Sequence, State


def test_decoding_rows_come_first_and_chunks_fill_the_rest() -> None:
    scheduler = scheduler_of()
    decoding, long, late = sequence_of(0, 1), sequence_of(1, 12), sequence_of(2, 5)
    scheduler.add(long)
    scheduler.add(decoding)
    scheduler.add(late)
    assert scheduler.plan().spans == [Span(decoding, 0, 1), Span(long, 0, 7)]


def test_no_more_run_than_a_step_has_rows() -> None:
    scheduler = scheduler_of(max_batch=4, max_chunk=2)
    for id_ in range(3):
        scheduler.add(sequence_of(id_, 1))
    for _ in range(3):
        plan = scheduler.plan()
        assert [span.sequence.request.id for span in plan.spans] == [0, 1]
        carry_out(scheduler, plan)
    assert len(scheduler.waiting) == 1


def test_admission_wants_a_block_of_headroom() -> None:
    scheduler = scheduler_of(n_blocks=4)
    scheduler.add(sequence_of(0, 4))  # 1 block and 1 to spare of 4
    scheduler.add(sequence_of(1, 12))  # 3 blocks are free, 4 are wanted
    assert [span.sequence.request.id for span in scheduler.plan().spans] == [0]


def test_headroom_is_not_asked_of_a_sequence_as_long_as_the_pool() -> None:
    scheduler = scheduler_of(n_blocks=4, max_chunk=16)
    scheduler.add(sequence_of(0, 15))
    assert [span.count for span in scheduler.plan().spans] == [15]


def states_of(*sequences: Sequence) -> list[State]:
    return [each.state for each in sequences]


def test_a_step_that_preempts_admits_nobody_and_the_next_no_newcomer() -> None:
    scheduler = scheduler_of(n_blocks=5, max_chunk=16)
    older, younger, newcomer = sequence_of(0, 8), sequence_of(1, 8), sequence_of(2, 1)
    scheduler.add(older)
    scheduler.add(younger)
    carry_out(scheduler, scheduler.plan())  # both have 2 blocks, both want a third: one is free
    scheduler.add(newcomer)
    assert scheduler.plan().spans == [Span(older, 8, 1)]
    assert states_of(older, younger, newcomer) == [State.RUNNING, State.PREEMPTED, State.WAITING]
    assert (younger.n_computed, younger.blocks, scheduler.kv.n_free) == (0, [], 2)
    assert (older.epoch, younger.epoch) == (0, 1), "a batch would trust the blocks it wrote before"
    # The newcomer's 2 blocks are free, but the preempted one comes first, and wants 4.
    assert scheduler.plan().spans == [Span(older, 8, 1)]
    scheduler.finish(older, "stop")
    # The younger one's full blocks are still there.
    assert scheduler.plan().spans == [Span(younger, 8, 1), Span(newcomer, 0, 1)]


def test_nobody_resumes_in_a_step_that_preempts_even_if_it_fits() -> None:
    """Two yield to a copy and a block: the younger one's few would fit in the other's many."""
    scheduler = scheduler_of(n_blocks=7, max_batch=4, max_chunk=5)
    parent, child = sequence_of(0, 8), Sequence(Request(1, sequence_of(0, 8).request.prompt_ids))
    large, small = sequence_of(2, 8), sequence_of(3, 1)
    scheduler.add(large)
    scheduler.add(small)
    carry_out(scheduler, scheduler.plan())
    carry_out(scheduler, scheduler.plan())
    scheduler.add(parent)
    carry_out(scheduler, scheduler.plan())
    assert [each.n_computed for each in (parent, large, small)] == [3, 9, 3]
    scheduler.fork(parent, child)
    scheduler.kv.groups[0].pool.allocate(1)  # to somebody else: none is free
    plan = scheduler.plan()
    assert scheduler.running == [parent, child]
    assert list(scheduler.preempted) == [small, large]
    assert (plan.record.n_preempted, plan.record.n_resumed) == (2, 0)
    assert scheduler.kv.start(small, len(small.tokens), headroom=1), "it would have fitted"


def test_the_youngest_yields_and_the_first_that_yielded_resumes_first() -> None:
    scheduler = scheduler_of(n_blocks=6, max_chunk=16)
    oldest, middle, youngest = (sequence_of(n, 4) for n in range(3))
    for each in (oldest, middle, youngest):
        scheduler.add(each)
    seen = []
    for _ in range(40):
        if middle.state is State.PREEMPTED:
            break
        carry_out(scheduler, scheduler.plan())
        if (states := states_of(oldest, middle, youngest)) not in seen:
            seen.append(states)
    run, out = State.RUNNING, State.PREEMPTED
    assert seen == [[run, run, run], [run, run, out], [run, out, out]]
    scheduler.finish(oldest, "stop")
    # The youngest wants 4 of 6 blocks, the middle one 5: only the first in the queue fits.
    assert scheduler.plan().spans == [Span(youngest, 0, 9)]


def test_what_never_fits_is_refused_at_once() -> None:
    scheduler = scheduler_of(n_blocks=4)
    with pytest.raises(RequestError, match="17 tokens; the context holds 16"):
        scheduler.add(sequence_of(0, 17))
    with pytest.raises(RequestError, match="the prompt has 32 tokens; the context holds 32"):
        scheduler_of().add(sequence_of(0, 32))
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(sequence_of(0, 0))
    assert not scheduler.has_work


def test_the_queue_is_bounded() -> None:
    scheduler = scheduler_of()
    for id_ in range(QUEUE):
        scheduler.add(sequence_of(id_, 2))
    with pytest.raises(RequestError, match="server busy, please try again") as refused:
        scheduler.add(sequence_of(QUEUE, 2))
    assert refused.value.hint == f"{QUEUE} requests are waiting already; try again later"
    assert Scheduler(kv_of(1), max_batch=1, max_chunk=1, max_context=1).queue_bound == 512


def run_until_decoding(scheduler: Scheduler, sequence: Sequence) -> None:
    for _ in range(sequence.n_prompt):
        if sequence.n_generated == 0:
            carry_out(scheduler, scheduler.plan())
    assert sequence.n_generated == 1


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_a_finished_request_leaves_its_prefix(reason: Any) -> None:
    scheduler = scheduler_of(max_chunk=32)
    first, second = sequence_of(0, 13, first=0), sequence_of(1, 13, first=0)
    scheduler.add(first)
    run_until_decoding(scheduler, first)
    scheduler.finish(first, reason)
    scheduler.add(second)
    assert scheduler.plan().spans == [Span(second, 12, 1)]
    counters = scheduler.kv.counters
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (2, 26, 12)


def test_a_failed_request_leaves_only_what_it_found() -> None:
    scheduler = scheduler_of(max_chunk=32)
    first, second, third = (sequence_of(n, 5 + 4 * n, first=0) for n in range(3))
    for each, reason in ((first, "stop"), (second, "error")):
        scheduler.add(each)
        run_until_decoding(scheduler, each)
        scheduler.finish(each, reason)  # type: ignore[arg-type]
    assert (first.n_prompt, second.n_prompt) == (5, 9)
    scheduler.add(third)
    assert scheduler.plan().spans == [Span(third, 4, 9)], "one block of the first, not two"


def test_running_sequences_share_a_prefix_and_its_blocks_count_once() -> None:
    scheduler = scheduler_of(n_blocks=5, max_chunk=32)
    first, second = sequence_of(0, 9, first=0), sequence_of(1, 9, first=0)
    scheduler.add(first)
    run_until_decoding(scheduler, first)
    scheduler.add(second)  # 3 blocks and one to spare; 2 are free, and 2 are the first one's
    assert [span.sequence for span in scheduler.plan().spans] == [first, second]
    assert second.blocks[0][:2] == first.blocks[0][:2]
    assert scheduler.kv.n_used == 4


def test_freed_blocks_admit_in_the_same_step() -> None:
    scheduler = scheduler_of(n_blocks=4)
    first, second = sequence_of(0, 12), sequence_of(1, 12)
    scheduler.add(first)
    scheduler.add(second)
    carry_out(scheduler, scheduler.plan())
    scheduler.finish(first, "cancelled")
    assert [span.sequence for span in scheduler.plan().spans] == [second]


def test_forks_share_all_blocks_until_they_write() -> None:
    scheduler = scheduler_of(max_chunk=32)
    parent = sequence_of(0, 6)
    scheduler.add(parent)
    scheduler.complete(plan := scheduler.plan())
    children = [Sequence(Request(n, parent.request.prompt_ids)) for n in (1, 2)]
    for child in children:
        scheduler.fork(parent, child)
    for token, each in enumerate([parent, *children]):
        assert each.n_computed == 6
        each.tokens.append(token)
    scheduler.end_step(plan)
    assert scheduler.kv.n_used == 2
    plan = scheduler.plan()
    assert [span.start for span in plan.spans] == [6, 6, 6]
    shared = parent.blocks[0][0]
    assert [each.blocks[0][0] for each in children] == [shared, shared]
    assert len({each.blocks[0][1] for each in (parent, *children)}) == 3
    # The first two to write get copies, the last one keeps the block.
    kept = children[1].blocks[0][1]
    assert plan.copies == [
        (0, kept, parent.blocks[0][1]),
        (0, kept, children[0].blocks[0][1]),
    ]
    assert [each.epoch for each in (parent, *children)] == [1, 1, 0]
    assert plan.record.n_copies == scheduler.kv.groups[0].pool.counters.copies == 2
    scheduler.complete(plan)
    assert scheduler.plan().copies == []


def test_a_fork_that_fails_leaves_its_parents_prefix() -> None:
    scheduler = scheduler_of(max_chunk=32)
    parent = sequence_of(0, 5)
    scheduler.add(parent)
    scheduler.complete(scheduler.plan())
    child = Sequence(Request(1, parent.request.prompt_ids))
    scheduler.fork(parent, child)
    scheduler.finish(child, "error")
    assert scheduler.kv.groups[0].pool.match(parent.links) == parent.blocks[0][:1]


def test_a_fork_that_may_not_run_waits_its_turn_and_finds_the_prefix() -> None:
    scheduler = scheduler_of(max_batch=1, max_chunk=32)
    parent = sequence_of(0, 9)
    scheduler.add(parent)
    scheduler.complete(scheduler.plan())
    child = Sequence(Request(1, parent.request.prompt_ids))
    scheduler.fork(parent, child)
    parent.tokens.append(1)
    child.tokens.append(2)
    assert child.state is State.PREEMPTED
    scheduler.finish(parent, "stop")
    assert scheduler.plan().spans == [Span(child, 8, 2)]


def test_evicted_blocks_come_back_from_the_store() -> None:
    scheduler = scheduler_of(n_blocks=6, max_chunk=32)
    engine = FakeEngine(scheduler, has_store=True)
    first, other = sequence_of(0, 13, first=0), sequence_of(1, 23)
    for each in (first, other):
        scheduler.add(each)
        run_until_decoding(scheduler, each)
        scheduler.finish(each, "stop")
    assert len(engine.stored[0]) == 3
    again = sequence_of(2, 13, first=0)
    scheduler.add(again)
    assert scheduler.plan().spans == [Span(again, 12, 1)]
    counters = scheduler.kv.counters
    assert (counters.hit_tokens, counters.store_tokens) == (0, 12)
    assert scheduler.kv.groups[0].pool.match(first.links) == again.blocks[0][:3]


def test_what_the_store_lacks_is_computed() -> None:
    scheduler = scheduler_of(n_blocks=6, max_chunk=32)
    engine = FakeEngine(scheduler, has_store=True)
    first, again = sequence_of(0, 13, first=0), sequence_of(2, 13, first=0)
    scheduler.add(first)
    run_until_decoding(scheduler, first)
    scheduler.finish(first, "stop")
    pool = scheduler.kv.groups[0].pool
    pool.free(pool.allocate(6))
    del engine.stored[0][first.links[1].digest]
    scheduler.add(again)
    assert scheduler.plan().spans == [Span(again, 4, 9)]


def test_a_running_stream_shrinks_the_chunk_to_the_budget() -> None:
    now = 0
    chunks = ChunkPolicy(512, budget_ms=20)
    scheduler = scheduler_of(
        n_blocks=800, max_chunk=512, max_context=3000, chunks=chunks, clock=lambda: now
    )

    def step() -> Plan:
        nonlocal now
        plan = scheduler.plan()
        now += 5_000_000 + 500_000 * plan.record.n_rows
        carry_out(scheduler, plan)
        return plan

    stream, prompt = sequence_of(0, 1), sequence_of(1, 1500)
    scheduler.add(stream)
    for _ in range(10):
        step()
    scheduler.add(prompt)
    plans = [step() for _ in range(40)]
    assert all(plan.record.decode_tokens == 1 for plan in plans)
    assert {plan.record.prefill_tokens for plan in plans[-5:]} <= {28, 29}
    assert plans[-1].record.total_ns <= 20_000_000
    assert scheduler.counters.sums["n_small"] > 30, "less than 32 tokens, and counted"


def test_what_a_slow_store_takes_comes_off_the_chunk() -> None:
    now = 0
    records: list[StepRecord] = []
    chunks = ChunkPolicy(512, budget_ms=40)
    scheduler = scheduler_of(
        n_blocks=300, max_batch=2, max_chunk=512, max_context=1500, chunks=chunks,
        clock=lambda: now, on_step=records.append,
    )  # fmt: skip

    def save(block: int, digest: bytes) -> None:
        nonlocal now
        now += 500_000

    scheduler.kv.groups[0].pool.on_evict = save
    stream, *prompts = sequence_of(0, 1), *(sequence_of(n, 200) for n in range(1, 12))
    scheduler.add(stream)
    for prompt in prompts:
        scheduler.add(prompt)
        while prompt.n_pending != 1:
            plan = scheduler.plan()
            now += 5_000_000 + 500_000 * plan.record.n_rows
            carry_out(scheduler, plan)
        scheduler.finish(prompt, "stop")
    slow = [each for each in records if each.admission_ns + each.reserve_ns > 20_000_000]
    assert len(slow) > 3, "hardly anything is evicted"
    assert all(each.prefill_tokens > 0 for each in slow)
    assert max(each.total_ns for each in records[1:]) <= 40_000_000
    assert max(each.prefill_tokens for each in records[-5:]) in (68, 69), "others have all of it"


def test_the_record_of_a_step_adds_up() -> None:
    times = iter(range(0, 10_000, 10))
    records: list[StepRecord] = []
    scheduler = scheduler_of(clock=lambda: next(times), on_step=records.append)
    for n in range(5):
        scheduler.add(sequence_of(n, 3))
    plan = scheduler.plan()
    scheduler.complete(plan)
    scheduler.end_step(plan)
    (record,) = records
    assert record == StepRecord(
        step=1, start_ns=0, reserve_ns=10, admission_ns=10, total_ns=30, n_rows=8,
        prefill_tokens=8, n_admitted=3, n_running=3, n_queue=2, n_free_blocks=7,
    )  # fmt: skip
    scheduler.end_step(scheduler.plan(), failed=True)
    counters = scheduler.counters
    assert (counters.n_steps, counters.n_failed, counters.sums["n_rows"]) == (2, 1, 9)
    assert scheduler.chunks.cost.n_steps == 1, "a step that failed teaches nothing"
