"""Log probabilities of the model's own distribution, before any sampler."""

from __future__ import annotations

from dataclasses import dataclass

from xpuc.runtime.candidates import Candidates, Floats


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability in nats, and the likeliest (id, logprob) at its place.

    `logprob` is None for a first token, which nothing predicts.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(candidates: Candidates, logits: Floats, id_: int, n_top: int) -> TokenLogprob:
    """Of one token under logits (n_vocab,) float32; the sum is taken in float64.

    `candidates` is the memory for it, whatever it held.
    """
    candidates.begin(logits)
    log_sum = candidates.log_sum()
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        candidates.keep_top(n_top)
        likeliest = zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True)
        top = tuple((each, logit - log_sum) for each, logit in likeliest)
    return TokenLogprob(id_, logits.item(id_) - log_sum, top)
