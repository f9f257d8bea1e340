"""A step, decided: what the scheduler hands to whoever runs the model."""

from __future__ import annotations

from collections.abc import Sequence as Many
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


class KeptSpans:
    """The spans of sequences that decode, kept from step to step.

    There are two sets of them, which take turns, as a step may be planned while the one before it
    is not read: a span holds until the second step after its own is planned.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._others: list[Span] = []

    def next(self, sequences: Many[Sequence]) -> list[Span]:
        """Spans of one token, as many as there are sequences, to be given sequence and start."""
        self._spans, self._others = self._others, self._spans
        spans = self._spans
        spans += [Span(each, 0, 1) for each in sequences[len(spans) :]]
        del spans[len(sequences) :]
        return spans


def decode_work(spans: Many[Span]) -> Work:
    """Of spans of one token each."""
    n = len(spans)
    return Work(n, 0, sum([span.start for span in spans]) + n)


class Copy(NamedTuple):
    """K/V of a group's block `source` that is to be in its block `destination` as well."""

    group: int
    source: int
    destination: int


@dataclass(slots=True)
class Plan:
    """What the model is to compute.

    spans   decoding rows first, then prompt chunks, by rank in each; those of decoding rows hold
            until the second plan after this one is made, see KeptSpans
    copies  to be made before that, in this order: a later destination may be an earlier source
    work    what the cost model takes for the step
    """

    spans: list[Span] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    record: StepRecord = field(default_factory=StepRecord)
