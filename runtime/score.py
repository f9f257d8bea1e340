"""Given tokens through the model, outside the scheduler: how likely a text is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass

from xpuc.errors import RequestError
from xpuc.runtime.batch import Batch, StepModel
from xpuc.runtime.blocks import BlockPool, PoolFull
from xpuc.runtime.candidates import Floats
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
def borrowed(pool: BlockPool, block_tokens: int, ids: Many[int]) -> Iterator[Sequence]:
    """A sequence that no scheduler knows, with blocks for all of `ids` until the block ends."""
    sequence = Sequence(Request(-1, tuple(ids)))
    try:
        sequence.blocks = pool.allocate(-(-len(ids) // block_tokens))
    except PoolFull as error:
        raise RequestError(
            f"{len(ids)} tokens need more K/V than is free: {error}",
            "wait for running requests, or score a shorter text",
        ) from None
    try:
        yield sequence
    finally:
        pool.free(sequence.blocks)


def teacher_forced(
    model: StepModel, batch: Batch, sequence: Sequence, chunk: int | None = None
) -> Iterator[tuple[int, Floats]]:
    """(position, logits (n_vocab,) of what follows it) for each token of `sequence`.

    `chunk`: rows per call, at most the model's. A row holds until the next one is asked for.
    """
    most = min(model.max_chunk, model.max_out_rows)
    rows = min(chunk or most, most)
    n = len(sequence.tokens)
    for start in range(0, n, rows):
        span = Span(sequence, start, min(rows, n - start))
        batch.fill([span], every_row=True)
        for offset, logits in enumerate(model.run(batch, greedy=False)):
            yield start + offset, logits


def score(rows: Iterator[tuple[int, Floats]], ids: Many[int], top_k: int) -> Score:
    """Of `ids`, whose `rows` come from teacher_forced."""
    positions = [TokenLogprob(ids[0], None)]
    for position, logits in rows:
        if position + 1 < len(ids):
            positions.append(token_logprob(logits, ids[position + 1], top_k))
    logprobs = [each.logprob for each in positions if each.logprob is not None]
    nll = -math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
    return Score(positions, nll, math.exp(nll))
