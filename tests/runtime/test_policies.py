"""The orders in which the scheduler serves, and the seed's nine lines of vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, kv_of

from xpuc.errors import RequestError
from xpuc.runtime.policies import LPM_PATIENCE, LPM_WINDOW
from xpuc.runtime.scheduler import Plan, Scheduler
from xpuc.runtime.sequence import Request, Sequence, State

VLLM_STEPS = """\
step 1: A+10 B+6                     free blocks 1, waiting [C]
step 2: A+1 B+3                      free blocks 0, waiting [C]
step 3: A+1 B+1                      free blocks 0, waiting [C]
step 4: preempt B; A+1               free blocks 2, waiting [B, C]
step 5: A+1                          free blocks 2, waiting [B, C]
step 6: A+1 (A done)                 free blocks 6, waiting [B, C]
step 7: B+11 C+5                     free blocks 1, waiting []
step 8: B+1 C+1 (B done)             free blocks 4, waiting []
step 9: C+1 (C done)                 free blocks 6, waiting []"""


def scheduler_of(n_blocks: int, policy: Any, **other: Any) -> Scheduler:
    sizes = {"max_batch": 4, "max_chunk": 16, "max_context": 64}
    reuse = other.pop("reuse", True)
    return Scheduler(kv_of(n_blocks, reuse=reuse), policy=policy, **(sizes | other))


def test_the_seeds_nine_lines() -> None:
    scheduler = scheduler_of(6, "vllm", reuse=False)
    names, lengths = "ABC", (6, 4, 2)
    sequences = []
    for id_, n_prompt in enumerate((10, 9, 6)):
        sequences.append(Sequence(Request(id_, tuple(range(n_prompt)))))
        scheduler.add(sequences[-1])
    lines = []
    while scheduler.has_work and len(lines) < 20:
        ran = {each: each.state is State.RUNNING for each in sequences}
        plan = scheduler.plan()
        words = [
            f"preempt {names[each.request.id]};"
            for each in sequences
            if ran[each] and each.state is State.PREEMPTED
        ]
        words += [f"{names[s.sequence.request.id]}+{s.count}" for s in plan.spans]
        scheduler.complete(plan)
        for span in plan.spans:
            if span.is_last:
                span.sequence.tokens.append(0)
        for each, most in zip(sequences, lengths, strict=True):
            if each.state is State.RUNNING and each.n_generated == most:
                scheduler.finish(each, "length")
                words.append(f"({names[each.request.id]} done)")
        scheduler.end_step(plan)
        queue = [*scheduler.preempted, *scheduler.waiting]
        lines.append(
            f"step {len(lines) + 1}: {' '.join(words):<28} free blocks {scheduler.kv.n_free}, "
            f"waiting [{', '.join(names[each.request.id] for each in queue)}]"
        )
    assert lines == VLLM_STEPS.splitlines()


def test_vllm_runs_no_more_than_the_batch_holds() -> None:
    scheduler = scheduler_of(16, "vllm", max_batch=2)
    for id_ in range(3):
        scheduler.add(Sequence(Request(id_, (id_,))))
    assert [span.sequence.request.id for span in run(scheduler).spans] == [0, 1]


def test_vllm_counts_the_blocks_that_a_hit_takes_off_the_free_list() -> None:
    scheduler = scheduler_of(3, "vllm")
    text = tuple(range(9))
    first, other, again = (Sequence(Request(n, t)) for n, t in enumerate((text, (7,), text)))
    scheduler.add(first)
    run(scheduler)
    scheduler.finish(first, "stop")
    scheduler.add(other)
    run(scheduler)
    scheduler.add(again)  # two blocks of it are free and found, and it wants a third
    assert [span.sequence for span in run(scheduler).spans] == [other]
    scheduler.finish(other, "stop")
    assert [(span.start, span.count) for span in run(scheduler).spans] == [(8, 1)]


def test_vllm_goes_on_after_blocks_of_the_store() -> None:
    scheduler = scheduler_of(4, "vllm", max_chunk=4)
    FakeEngine(scheduler, has_store=True)
    text = tuple(range(13))
    first, again = Sequence(Request(0, text)), Sequence(Request(1, text))
    scheduler.add(first)
    for _ in range(4):
        run(scheduler)
    scheduler.finish(first, "stop")
    pool = scheduler.kv.groups[0].pool
    pool.free(pool.allocate(4))
    scheduler.add(again)
    assert [(span.start, span.count) for span in run(scheduler).spans] == [(12, 1)]


def run(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    scheduler.complete(plan)
    for span in plan.spans:
        if span.is_last:
            span.sequence.tokens.append(0)
    scheduler.end_step(plan)
    return plan


def served(scheduler: Scheduler) -> list[int]:
    """Ids in the order in which they run, one after the other."""
    order = []
    while scheduler.has_work and len(order) < 20:
        for span in run(scheduler).spans:
            order.append(span.sequence.request.id)
            scheduler.finish(span.sequence, "stop")
    return order


def test_the_smallest_priority_number_is_served_first() -> None:
    scheduler = scheduler_of(8, "priority", max_batch=1)
    for id_, priority in enumerate((1, 0, 1, -5, 0)):
        scheduler.add(Sequence(Request(id_, (id_, 1), priority=priority)))
    assert served(scheduler) == [3, 1, 4, 0, 2]


def test_the_least_urgent_yields() -> None:
    scheduler = scheduler_of(5, "priority")
    urgent, old = (Sequence(Request(n, tuple(range(n, n + 8)), priority=n)) for n in (1, 2))
    for each in (old, urgent):
        scheduler.add(each)
    run(scheduler)
    run(scheduler)
    assert (urgent.state, old.state) == (State.RUNNING, State.PREEMPTED)


def test_the_longest_cached_prefix_comes_first() -> None:
    scheduler = scheduler_of(12, "lpm", max_batch=1)
    text = tuple(range(16))
    prompts = [text, (99, 1), (*text[:4], 7), (*text[:12], 8), (*text[:4], 9)]
    for id_, prompt in enumerate(prompts):
        scheduler.add(Sequence(Request(id_, prompt)))
    assert served(scheduler) == [0, 3, 2, 4, 1]


def test_a_cached_prefix_passes_only_so_often() -> None:
    scheduler = scheduler_of(12, "lpm", max_batch=1)
    text = tuple(range(9))
    for id_, prompt in enumerate([text, (99,)]):
        scheduler.add(Sequence(Request(id_, prompt)))
    order: list[int] = []
    while 1 not in order and len(order) < 2 * LPM_PATIENCE:
        scheduler.add(Sequence(Request(2 + len(order), (*text, 5))))
        (span,) = run(scheduler).spans
        order.append(span.sequence.request.id)
        scheduler.finish(span.sequence, "stop")
    assert len(order) == LPM_PATIENCE + 2


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_prefix_is_looked_for_in_a_part_of_the_queue(is_looked_at: bool) -> None:
    scheduler = scheduler_of(12, "lpm", max_batch=1)
    text = tuple(range(9))
    scheduler.add(Sequence(Request(0, text)))
    (first,) = run(scheduler).spans
    scheduler.finish(first.sequence, "stop")
    n_before = LPM_WINDOW - is_looked_at
    for id_ in range(1, n_before + 1):
        scheduler.add(Sequence(Request(id_, (99, id_))))
    scheduler.add(Sequence(Request(n_before + 1, (*text, 5))))
    (span,) = run(scheduler).spans
    assert span.sequence.request.id == (n_before + 1 if is_looked_at else 1)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown scheduling policy 'fifo'") as refused:
        scheduler_of(4, "fifo")
    assert "fcfs, lpm, priority, vllm" in (refused.value.hint or "")
