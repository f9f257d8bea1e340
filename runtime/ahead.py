"""A step planned before the one before it is read: the same sequences, each one token on.

Their tokens to come are placeholders then. A step ahead decides nothing that the result it does not
know could change, and takes from nobody: no one could come in, yields or shares a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuc.runtime.plan import Plan, decode_work
from xpuc.runtime.sequence import Sequence

if TYPE_CHECKING:
    from xpuc.runtime.scheduler import Scheduler


def follows(scheduler: Scheduler, plan: Plan) -> bool:
    """Whether the step after `plan` is to be the same sequences' next tokens, which have blocks
    then. Those that they were given if it is not are those they get next anyway."""
    running = scheduler.running
    may_come_in = len(running) < scheduler.max_running
    if may_come_in and (scheduler.waiting or scheduler.preempted):
        return False
    if scheduler.drafter is not None or len(plan.spans) != len(running):
        return False
    for span, sequence in zip(plan.spans, running, strict=True):
        if span.sequence is not sequence or span.count != 1 or sequence.n_pending != 1:
            return False
    return all(_has_room(scheduler, sequence) for sequence in running)


def fill(scheduler: Scheduler, plan: Plan) -> None:
    """One token of every running sequence into an empty plan."""
    plan.spans += scheduler.kept.next(scheduler.running)
    for span, sequence in zip(plan.spans, scheduler.running, strict=True):
        span.sequence = sequence
        span.start = sequence.n_computed
    plan.work = decode_work(plan.spans)


def _has_room(scheduler: Scheduler, sequence: Sequence) -> bool:
    """Give it a block of its own for its last token; False if that takes somebody else's."""
    if sequence.may_share:
        return False
    n = len(sequence.tokens)
    return n <= sequence.n_room or scheduler.kv.grow(sequence, n, [])
