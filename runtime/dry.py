"""The DRY penalty: a token that would continue a repetition costs more the longer it already is.

Source: "DRY: a modern repetition penalty" (p-e-w, text-generation-webui pull request 5677).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from xpuc.runtime.sampling_params import SamplingParams

Breakers = dict[int, list[tuple[int, ...]]]
"""Token that starts a breaker -> the tokens that complete it (none: it is one by itself)."""

_MAX_TAIL = 20  # tokens of a breaker after its first
_FLOAT32_MAX_LOG = 88.72284
_LARGEST = 1e30  # leaves the logit a float32 number


def has_dry(params: SamplingParams) -> bool:
    return params.dry_multiplier != 0 and params.dry_base >= 1 and params.dry_last_n != 0


def find_breakers(
    texts: Sequence[str], pieces: Sequence[str], encode: Callable[[str], list[int]]
) -> Breakers:
    """Every way a breaker text can begin inside a token of the vocabulary (`pieces`, by id)."""
    breakers: Breakers = {}
    for text in texts:
        tails = {n: tuple(encode(text[n:])[:_MAX_TAIL]) for n in range(1, len(text))}
        for token, piece in enumerate(pieces):
            if text in piece:
                breakers.setdefault(token, []).append(())
                continue
            for n, tail in tails.items():
                if piece.endswith(text[:n]) and tail not in breakers.get(token, ()):
                    breakers.setdefault(token, []).append(tail)
    return breakers


def dry_penalties(
    tokens: Sequence[int], params: SamplingParams, breakers: Breakers
) -> dict[int, float]:
    """Token -> what to take off its logit, given the context so far."""
    context = tokens if params.dry_last_n < 0 else tokens[max(len(tokens) - params.dry_last_n, 0) :]
    allowed = params.dry_allowed_length
    longest = _longest_that_counts(params)
    limit = min(_since_breaker(context, breakers, longest), longest)
    if len(context) <= allowed or limit < allowed:
        return {}
    penalties = {}
    for token, length in _repeats(context, limit).items():
        if length >= allowed and () not in breakers.get(token, ()):
            cost = params.dry_multiplier * params.dry_base ** (length - allowed)
            penalties[token] = min(cost, _LARGEST)
    return penalties


def _longest_that_counts(params: SamplingParams) -> int:
    """Beyond this length the penalty stays as it is, so that it never overflows float32."""
    if params.dry_base <= 1.000001:
        return params.dry_allowed_length
    return params.dry_allowed_length + int(_FLOAT32_MAX_LOG / math.log(params.dry_base))


def _since_breaker(context: Sequence[int], breakers: Breakers, longest: int) -> int:
    """How many tokens follow the last breaker; no need to know beyond `longest`."""
    for back in range(min(len(context), longest + _MAX_TAIL + 1)):
        start = len(context) - 1 - back
        lengths = [
            len(tail)
            for tail in breakers.get(context[start], ())
            if len(tail) <= back and tuple(context[start + 1 : start + 1 + len(tail)]) == tail
        ]
        if lengths:
            return back - max(lengths)
    return len(context)


def _repeats(context: Sequence[int], limit: int) -> dict[int, int]:
    """Token -> length of the longest end of the context that it followed before, up to `limit`."""
    array = np.asarray(context, dtype=np.int64)
    n = len(array)
    ends = np.flatnonzero(array[:-1] == array[-1])
    longest: dict[int, int] = {}
    for length in range(1, limit + 1):
        if not len(ends):
            break
        for token in np.unique(array[ends + 1]).tolist():
            longest[token] = length
        ends = ends[ends >= length]
        ends = ends[array[ends - length] == array[n - 1 - length]]
    return longest
