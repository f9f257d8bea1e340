"""How far two models' predictions lie apart: KL divergence, argmax by margin, errors.

Arrays in, numbers out. Logits and logprobs are (n, vocab); teacher-forced rows are those that
predict a given continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]

# A rounded top 10 may sum to 1 or a little more; what is left is then this, not 0.
LEAST = 1e-9


def log_softmax(logits: ArrayLike) -> F64:
    """Logprobs in float64, over the last axis."""
    x = np.array(logits, np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def margins(logits: ArrayLike) -> F64:
    """Nats between the likeliest and the second, (n,)."""
    best = np.partition(logits, -2, axis=-1)[..., -2:].astype(np.float64)
    return best[..., 1] - best[..., 0]


def kl_full(reference_logits: ArrayLike, candidate_logits: ArrayLike) -> F64:
    """KL(reference ‖ candidate) over the whole vocabulary, nats, (n,)."""
    p, q = log_softmax(reference_logits), log_softmax(candidate_logits)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def kl_buckets(reference: ArrayLike, candidate: ArrayLike) -> F64:
    """KL over logprobs (n, k) of the same ids, plus one bucket for every other id, nats, (n,)."""
    p, q = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    p_rest = np.maximum(LEAST, 1.0 - np.exp(p).sum(axis=-1))
    q_rest = np.maximum(LEAST, 1.0 - np.exp(q).sum(axis=-1))
    return (np.exp(p) * (p - q)).sum(axis=-1) + p_rest * np.log(p_rest / q_rest)


def kl_top10(top10: Sequence[Sequence[Sequence[float]]], candidate_logprobs: ArrayLike) -> F64:
    """KL over the reference's top 10 and one bucket for the rest, (n,).

    `top10` is a list of (id, logprob) a row, as the golden files hold it.
    """
    ids = np.array([[int(token) for token, _ in row] for row in top10])
    logprobs = np.array([[logprob for _, logprob in row] for row in top10])
    candidate = np.asarray(candidate_logprobs, np.float64)
    assert len(candidate) == len(ids), f"{len(candidate)} rows against {len(ids)} of the reference"
    return kl_buckets(logprobs, np.take_along_axis(candidate, ids, axis=-1))


@dataclass(frozen=True)
class Agreement:
    """Argmax against argmax. `worst_margin` is the largest reference margin, in nats, at which they
    differ (0 where they never do), at row `worst_row` (-1)."""

    rows: int
    agreed: int
    worst_margin: float
    worst_row: int

    def holds(self, margin: float) -> bool:
        """Whether the argmax is the same at every row of a reference margin of `margin` or more."""
        return self.worst_row < 0 or self.worst_margin < margin


def agreement(ids: ArrayLike, reference_margins: ArrayLike, candidate_ids: ArrayLike) -> Agreement:
    """Compare the likeliest ids of each row, given the reference's margins; all are (n,)."""
    differ = np.flatnonzero(np.asarray(ids) != np.asarray(candidate_ids))
    rows = len(np.asarray(ids))
    if len(differ) == 0:
        return Agreement(rows, rows, 0.0, -1)
    there = np.asarray(reference_margins, np.float64)[differ]
    worst = int(there.argmax())
    return Agreement(rows, rows - len(differ), float(there[worst]), int(differ[worst]))


def logit_agreement(reference_logits: ArrayLike, candidate_logits: ArrayLike) -> Agreement:
    """`agreement` from two arrays of logits."""
    reference, candidate = np.asarray(reference_logits), np.asarray(candidate_logits)
    return agreement(reference.argmax(-1), margins(reference), candidate.argmax(-1))


def relative_error(reference: ArrayLike, candidate: ArrayLike) -> float:
    """Largest difference over largest reference value; infinite if any value is not finite."""
    x, y = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    assert x.shape == y.shape, f"{x.shape} against {y.shape}"
    error = np.abs(x - y).max() / np.abs(x).max()
    return float(error) if np.isfinite(error) else float("inf")


def forced_ids(prompt: Sequence[int], continuation: Sequence[int]) -> list[int]:
    """What to read so that some row predicts each id of the continuation."""
    return [*prompt, *continuation[:-1]]


def forced_rows(every: NDArray[Any], prompt: Sequence[int]) -> NDArray[Any]:
    """Of the rows that reading `forced_ids` gives, those that predict the continuation."""
    return every[len(prompt) - 1 :]
