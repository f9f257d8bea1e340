"""Log probabilities of the model's own distribution, before any sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from xpuc.runtime.candidates import Floats, top_ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability in nats, and the likeliest (id, logprob) at its place.

    `logprob` is None for a first token, which nothing predicts.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: Floats, id_: int, n_top: int) -> TokenLogprob:
    """Of one token under logits (n_vocab,) float32; the sum is taken in float64."""
    largest = float(logits.max())
    log_sum = largest + math.log(float(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))
    likeliest = top_ids(logits, n_top).tolist() if n_top else []
    top = tuple((each, float(logits[each]) - log_sum) for each in likeliest)
    return TokenLogprob(id_, float(logits[id_]) - log_sum, top)
