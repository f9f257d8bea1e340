"""A step as vLLM plans it (the policy "vllm"): running sequences first, in the order they came in.

Each takes as many of the step's rows as it is behind by, and blocks for those only; where blocks
are short the one that came in last yields, to the front of the queue. Then waiting ones come in
while rows are left, unless someone had to yield in this step. There is no headroom and no chunk
budget: this is for comparison, and for those who expect it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuc.runtime.cost_model import Work
from xpuc.runtime.plan import Plan, Span
from xpuc.runtime.sequence import State
from xpuc.runtime.turns import take_turns

if TYPE_CHECKING:
    from xpuc.runtime.scheduler import Scheduler


def schedule(scheduler: Scheduler, plan: Plan) -> None:
    """Fill an empty plan."""
    rows = _serve_running(scheduler, plan, scheduler.max_chunk)
    if not plan.record.n_preempted:
        _serve_waiting(scheduler, plan, rows)
    if scheduler.singly:
        take_turns(plan)
    plan.work = _work(plan)


def _serve_running(scheduler: Scheduler, plan: Plan, rows: int) -> int:
    """Rows that are left of `rows`."""
    for sequence in list(scheduler.running):
        start = sequence.n_computed
        count = min(len(sequence.tokens) - start, rows)
        if not count:
            continue
        if start + count > sequence.n_room or sequence.may_share:
            # The last one yields, so those after one that has yielded have as well.
            if sequence.state is not State.RUNNING:
                break
            if not scheduler.reserve(sequence, start + count, plan):
                break
        plan.spans.append(Span(sequence, start, count))
        rows -= count
    return rows


def _serve_waiting(scheduler: Scheduler, plan: Plan, rows: int) -> None:
    while rows and len(scheduler.running) < scheduler.max_running:
        queue = scheduler.preempted or scheduler.waiting
        if not queue:
            return
        sequence = queue[0]
        if not scheduler.kv.start(sequence, rows):
            return
        if queue is scheduler.preempted:
            plan.record.n_resumed += 1
        else:
            plan.record.n_admitted += 1
        del queue[0]
        scheduler.enter(sequence)
        count = min(sequence.n_pending, rows)
        plan.spans.append(Span(sequence, sequence.n_computed, count))
        rows -= count


def _work(plan: Plan) -> Work:
    n_decoding = attended = n_chunk = 0
    for span in plan.spans:
        count = span.count
        if count == 1:
            n_decoding += 1
            attended += span.start + 1
        else:
            n_chunk += count
            attended += count * span.start + count * (count + 1) // 2
    return Work(n_decoding, n_chunk, attended)
