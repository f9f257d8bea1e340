"""A step, decided: what the scheduler hands to whoever runs the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from xpuc.runtime.cost_model import Work
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.sequence import Sequence


@dataclass(slots=True)
class Span:
    """`count` tokens of a sequence from position `start`: its part of one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the next token follows from this span, so that its result is wanted."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class Plan:
    """What the model is to compute.

    spans   decoding rows first, then prompt chunks, by rank in each
    copies  (source, destination) blocks whose K/V is to be copied before that, in this order: a
            later destination may be an earlier source
    work    what the cost model takes for the step
    """

    spans: list[Span] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    record: StepRecord = field(default_factory=StepRecord)
