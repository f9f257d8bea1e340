"""Decoding singly, for models that take no batch: one sequence a step goes on, each in its turn."""

from __future__ import annotations

from xpuc.runtime.plan import Plan


def take_turns(plan: Plan) -> None:
    """Of the spans that decode, leave in the plan that of the sequence which has waited longest."""
    decoding = [span for span in plan.spans if span.count == 1 and span.is_last]
    if not decoding:
        return
    chosen = min(decoding, key=lambda span: span.sequence.decoded_in)
    chosen.sequence.decoded_in = plan.record.step
    plan.spans[:] = [span for span in plan.spans if span is chosen or span not in decoding]
