"""The tokens still in play while a chain of samplers narrows them down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indexes = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_GROUP = 512


def top_ids(logits: Floats, k: int) -> Indexes:
    """The `k` largest of (n,), falling; equal ones by rising index. All of them if k >= n.

    The k-th largest group maximum bounds the k-th largest logit from below, so two passes over the
    vocabulary leave a few hundred to sort, whatever order it is in.
    """
    n_groups = len(logits) // _GROUP
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    if k < n_groups:
        maxima = logits[: n_groups * _GROUP].reshape(n_groups, _GROUP).max(axis=1)
        bound = np.partition(maxima, n_groups - k)[n_groups - k]
    else:
        bound = np.partition(logits, len(logits) - k)[len(logits) - k]
    kept = np.flatnonzero(logits >= bound)
    return kept[np.argsort(-logits[kept], kind="stable")[:k]]


class Candidates:
    """Ids (n,) and float32 logits (n,), at first the whole vocabulary as the model gave it.

    `is_sorted`: by falling logit. The model's own array is copied before it is written to.
    """

    def __init__(self, logits: Floats) -> None:
        self.logits = logits
        self._ids: Indexes | None = None  # None: the id is the index
        self._is_copy = False
        self.is_sorted = False

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def ids(self) -> Indexes:
        return np.arange(len(self.logits)) if self._ids is None else self._ids

    def id_at(self, index: int) -> int:
        return index if self._ids is None else int(self._ids[index])

    def keep(self, indexes: Indexes, *, is_sorted: bool) -> None:
        """Drop all others; `indexes` gives the new order too."""
        self._ids = indexes if self._ids is None else self._ids[indexes]
        self.logits = self.logits[indexes]
        self._is_copy = True
        self.is_sorted = is_sorted

    def restrict(self, allowed: Mask) -> None:
        """Leave ids that `allowed` (n,) has True for; one that it is too short for is not.

        A few are picked out; of many the others become impossible, which is less work.
        """
        if 8 * np.count_nonzero(allowed) < len(self):
            self.keep(np.flatnonzero(allowed), is_sorted=False)
            return
        logits = self.writable()
        logits[len(allowed) :] = -np.inf
        np.copyto(logits[: len(allowed)], -np.inf, where=~allowed)

    def top(self, k: int) -> Indexes:
        """Indexes of the `k` likeliest, falling."""
        return np.arange(min(k, len(self))) if self.is_sorted else top_ids(self.logits, k)

    def sort(self) -> None:
        if not self.is_sorted:
            self.keep(self.top(len(self)), is_sorted=True)

    def writable(self) -> Floats:
        """The logits to change in place; the order may no longer hold afterwards."""
        if not self._is_copy:
            self.logits = self.logits.copy()
            self._is_copy = True
        self.is_sorted = False
        return self.logits

    def find(self, tokens: Sequence[int]) -> tuple[Indexes, Indexes]:
        """Where the given tokens stand: (indexes, and which of `tokens` each of them is)."""
        wanted = np.asarray(tokens, dtype=np.intp)
        if self._ids is None:
            return wanted, np.arange(len(wanted))
        place = np.full(max(int(self._ids.max(initial=-1)), *tokens, 0) + 1, -1)
        place[self._ids] = np.arange(len(self._ids))
        nth = np.flatnonzero(place[wanted] >= 0)
        return place[wanted[nth]], nth

    def weights(self) -> Floats:
        """exp(logit - largest logit) (n,); sums of them are to be taken in float64."""
        largest = self.logits[0] if self.is_sorted else self.logits.max()
        weights: Floats = np.exp(self.logits - largest)
        return weights

    def probabilities(self) -> npt.NDArray[np.float64]:
        p = self.weights().astype(np.float64)
        p /= p.sum()
        return p
