"""Given tokens through the model, outside the scheduler: how likely a text is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass

from xpuc.errors import RequestError
from xpuc.runtime.batch import Batch, StepModel
from xpuc.runtime.candidates import Candidates, Floats
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.logprobs import TokenLogprob, token_logprob
from xpuc.runtime.scheduler import Span
from xpuc.runtime.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Score:
    """`positions[i]` says how likely token i was after those before it; the first is not predicted.

    nll: mean negative log likelihood in nats of the predicted tokens; perplexity = exp(nll).
    """

    positions: list[TokenLogprob]
    nll: float
    perplexity: float


@contextmanager
def borrowed(kv: KvBlocks, ids: Many[int]) -> Iterator[Sequence]:
    """A sequence that no scheduler knows, with blocks for `ids` until the block ends."""
    sequence = Sequence(Request(-1, tuple(ids)))
    if not kv.borrow(sequence, len(ids)):
        raise RequestError(
            f"{len(ids)} tokens need more K/V than there is: {kv.n_free} blocks are free",
            "wait for running requests, or score a shorter text",
        )
    try:
        yield sequence
    finally:
        kv.release(sequence)


def teacher_forced(
    model: StepModel, batch: Batch, kv: KvBlocks, sequence: Sequence, chunk: int | None = None
) -> Iterator[tuple[int, Floats]]:
    """(position, logits (n_vocab,) of what follows it) for each token of a borrowed `sequence`.

    `chunk`: rows per call, at most the model's. A row holds until the next one is asked for.
    """
    most = min(model.max_chunk, model.max_out_rows)
    n_rows = min(chunk or most, most)
    n = len(sequence.tokens)
    for start in range(0, n, n_rows):
        span = Span(sequence, start, min(n_rows, n - start))
        batch.fill([span], every_row=True)
        rows = model.run(batch, tail="logits")
        # At once: what is given back here is what the next rows take.
        kv.slide(sequence, start + span.count)
        is_enough = kv.grow(sequence, n, [])
        assert is_enough, "a sequence alone with its blocks lacks some"
        for offset, logits in enumerate(rows):
            yield start + offset, logits


def score(rows: Iterator[tuple[int, Floats]], ids: Many[int], top_k: int) -> Score:
    """Of `ids`, whose `rows` come from teacher_forced."""
    positions, candidates = [TokenLogprob(ids[0], None)], Candidates()
    for position, logits in rows:
        if position + 1 < len(ids):
            positions.append(token_logprob(candidates, logits, ids[position + 1], top_k))
    logprobs = [each.logprob for each in positions if each.logprob is not None]
    nll = -math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
    return Score(positions, nll, math.exp(nll))
