"""A plan on its way through the model: whom it is for, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch, Ticket
from xpuc.runtime.generation import Generation
from xpuc.runtime.plan import Plan, Span


@dataclass(slots=True)
class Step:
    """A plan, whose spans it has, whose result is wanted, what the model gives, and if it is queued
    its ticket.

    What a queued step has written for sequences that have ended meanwhile is nobody's: their blocks
    are written again, by whoever has them next, after it.
    """

    plan: Plan
    generations: list[Generation]
    wanted: list[tuple[Generation, Span]]
    tail: Tail
    ticket: Ticket | None = None

    def issue(
        self, batch: Batch, call: Callable[..., Any], *, n_unknown: int = 0, **options: Any
    ) -> Any:
        """Fill the batch and make a `call` of the model; what it gives. See `describe`."""
        start = time.perf_counter_ns()
        self.describe(batch, n_unknown=n_unknown)
        filled = time.perf_counter_ns()
        given = call(batch, tail=self.tail, **options)
        record = self.plan.record
        record.fill_ns, record.issue_ns = filled - start, time.perf_counter_ns() - filled
        return given

    def describe(self, batch: Batch, *, n_unknown: int = 0) -> None:
        """Fill the batch; the last `n_unknown` tokens of each sequence are still to be chosen."""
        batch.fill(self.plan.spans)
        if self.tail != "sampled":
            return
        place = 0
        for generation, span in self.wanted:
            chain = generation.chain
            assert chain.sampling is not None
            for n in range(1 + len(span.drafts)):
                u, banned = chain.ahead(n_unknown + n), generation.banned_after(n)
                batch.sample(place, chain.sampling, u, banned)
                place += 1


def tail_of(generations: Iterable[Generation], tails: Collection[Tail]) -> Tail:
    """The least that serves them all, of what a model has."""
    needed: set[Tail] = {each.tail for each in generations} or {"greedy"}
    if "logits" in needed or not needed <= set(tails):
        return "logits"
    return "sampled" if "sampled" in needed else "greedy"
