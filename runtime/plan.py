"""A step, decided: what the scheduler hands to whoever runs the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from xpuc.runtime.cost_model import Work
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.sequence import Sequence


@dataclass(slots=True)
class Span:
    """`count` tokens of a sequence from position `start`: its part of one step.

    drafts      tokens guessed to follow, which are not in the sequence; each is a row more
    n_accepted  how many of them turned out right
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    n_accepted: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the next token follows from this span, so that its result is wanted."""
        return self.start + self.count == len(self.sequence.tokens)


class Copy(NamedTuple):
    """K/V of a group's block `source` that is to be in its block `destination` as well."""

    group: int
    source: int
    destination: int


@dataclass(slots=True)
class Plan:
    """What the model is to compute.

    spans   decoding rows first, then prompt chunks, by rank in each
    copies  to be made before that, in this order: a later destination may be an earlier source
    work    what the cost model takes for the step
    """

    spans: list[Span] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    record: StepRecord = field(default_factory=StepRecord)
