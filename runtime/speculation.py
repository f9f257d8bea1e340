"""Speculative decoding: tokens likely to come next are computed along with the pending one.

A draft's row is right if every token before it is what was chosen, and then its result is that of
a step of its own: what is accepted is exactly what would have come, for greedy and seeded sampling
alike. Drafts are looked up in the sequence itself (ngram.py), so no weights are needed. A step of
two rows takes more time than one of one row, but less than two steps.

Drafts are for steps in which nothing but decoding goes on. They take rows and blocks that nobody
wants, and give back the blocks in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from xpuc.errors import FieldError
from xpuc.runtime.cost_model import Work
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.ngram import Lookup
from xpuc.runtime.plan import Plan, Span
from xpuc.runtime.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made. Off by default; 7 fills the decode call of 8 rows.

    draft_max  most tokens of a draft (llama.cpp's --draft-max); 0: no drafts
    ngram_min  fewest tokens at the end of a text that are looked for earlier in it
    ngram_max  most of them; vLLM calls the two prompt_lookup_min and prompt_lookup_max
    """

    draft_max: int = 0
    ngram_min: int = 3
    ngram_max: int = 4

    def __post_init__(self) -> None:
        for name, least in (("draft_max", 0), ("ngram_min", 1), ("ngram_max", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise FieldError([name], f" is {value!r}", f"give a whole number from {least} up")
        if self.ngram_min > self.ngram_max:
            raise FieldError(
                ["ngram_min"],
                f" is {self.ngram_min}, above ngram_max {self.ngram_max}",
                "lower ngram_min, or raise ngram_max",
            )


class Drafter:
    """Puts drafts into plans, and learns from what came of them.

    max_rows: of a decode call; RequestError if it has no room for a draft.
    """

    def __init__(self, speculation: Speculation, *, max_rows: int) -> None:
        if speculation.draft_max and max_rows < 2:
            raise FieldError(
                ["draft_max"],
                f" is {speculation.draft_max}, but the artifact decodes one row a step",
                "compile it again with a larger --max-batch, or draft nothing",
            )
        self.speculation = speculation
        self._max_rows = max_rows

    def draft(self, plan: Plan, kv: KvBlocks, max_tokens: int) -> None:
        """Add drafts to a plan of decoding spans only; no sequence may exceed `max_tokens`."""
        spans = plan.spans
        n_free_rows = self._max_rows - len(spans)
        if not spans or n_free_rows <= 0 or not all(s.count == 1 and s.is_last for s in spans):
            return
        found = [self._propose(span.sequence, max_tokens) for span in spans]
        shares = fair_shares([len(each) for each in found], n_free_rows, plan.record.step)
        for place, (span, tokens, share) in enumerate(zip(spans, found, shares, strict=True)):
            n = _reserve(span.sequence, share, kv)
            if n:
                spans[place] = drafted = replace(span, drafts=tuple(tokens[:n]))
                span.sequence.n_drafted += n
                plan.work = _with_drafts(plan.work, drafted)
                plan.record.n_drafted += n

    def settle(self, plan: Plan, kv: KvBlocks) -> None:
        """The step is over: blocks of drafts that were wrong are free again."""
        for span in plan.spans:
            sequence = span.sequence
            if not span.drafts or sequence.state is not State.RUNNING:
                continue
            assert sequence.lookup is not None
            sequence.lookup.learn(len(span.drafts), span.n_accepted)
            kv.truncate(sequence)

    def _propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """A draft that does not go beyond the end of the answer."""
        if sequence.n_generated == 0:  # the result may be for several completions
            return []
        params, how = sequence.request.params, self.speculation
        most = min(how.draft_max, max_tokens - len(sequence.tokens) - 1)
        if params.draft_max is not None:
            most = min(most, params.draft_max)
        if params.max_tokens is not None:
            most = min(most, params.max_tokens - sequence.n_generated - 1)
        if most <= 0:
            return []
        if sequence.lookup is None:
            sequence.lookup = Lookup(how.ngram_min, how.ngram_max)
        return sequence.lookup.propose(sequence.tokens, most)


def fair_shares(wanted: Many[int], n: int, first: int = 0) -> list[int]:
    """How many of `n` each gets that wants so many: one each in turn, from place `first` on."""
    shares = [0] * len(wanted)
    turns = [(first + i) % len(wanted) for i in range(len(wanted))]
    while n and (hungry := [i for i in turns if shares[i] < wanted[i]]):
        for i in hungry[:n]:
            shares[i] += 1
        n -= min(n, len(hungry))
    return shares


def _reserve(sequence: Sequence, n: int, kv: KvBlocks) -> int:
    """Room for `n` tokens after those there are if blocks are free; how many there is room for."""
    n_tokens = len(sequence.tokens)
    if n and n_tokens + n > sequence.n_room:
        kv.grow(sequence, n_tokens + n, [])
    return min(n, sequence.n_room - n_tokens)


def _with_drafts(work: Work, span: Span) -> Work:
    n = len(span.drafts)
    attended = work.attended + n * (span.start + 1) + n * (n + 1) // 2
    return Work(work.decode_rows + n, work.chunk_tokens, attended)
