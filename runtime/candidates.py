"""The tokens still in play while a chain of samplers narrows them down.

The likeliest few (FEW) are lists of Python's numbers, as long as nothing but what they need is done
with them: a call of numpy's takes longer than all of them. Where few are looked for no array is
made for a token. Where there are more numpy makes some: views of parts, the places of logits above
a bound and their order, copies to partition.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from itertools import accumulate
from operator import neg

import numpy as np
import numpy.typing as npt

from xpuc.runtime.scratch import FEW, Scratch

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_N_GROUPS = 512  # at most
_N_FOLDED = 256  # arrays of logits that are known, at most


class Candidates:
    """Ids (n,) and float32 logits (n,), at first the whole vocabulary as the model gave it.

    The model's own array is copied before it is written to. What its methods give is memory of
    its own, and holds until the next call of the same.

    is_sorted  by falling logit
    """

    def __init__(self) -> None:
        self._make(0)

    def _make(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._held, self._spare, self._seen, self._other, self._weights = (
            Scratch(n_vocab, "float32") for _ in range(5)
        )
        self._ids, self._spare_ids, self._places = (Scratch(n_vocab, "intp") for _ in range(3))
        self._sums, self._values = (Scratch(n_vocab, "float64") for _ in range(2))
        self._single, self._total = np.empty(1, np.float32), np.empty(1, np.float64)
        self._is_in = bytearray(n_vocab)
        self._mask = np.frombuffer(self._is_in, np.bool_)
        # A group is every _n_groups-th logit, as likely ones are neighbours in many a vocabulary.
        self._n_groups = min(_N_GROUPS, n_vocab)
        self._maxima = np.empty(self._n_groups, np.float32)
        self._first_maxima = self._maxima[: n_vocab % max(1, self._n_groups)]
        # By id: an array, its whole rows of a logit of each group, and the rest.
        self._folded: dict[int, tuple[Floats, Floats, Floats]] = {}

    def begin(self, logits: Floats) -> None:
        """All tokens, with the logits (n_vocab,) that the model gives them."""
        if len(logits) != self._n_vocab:
            self._make(len(logits))
        self._logits = logits
        self._few: list[float] | None = None  # logits in place of _logits, falling
        self._few_ids: list[int] = []
        self._is_whole, self._is_own, self._is_grouped, self.is_sorted = True, False, False, False

    def __len__(self) -> int:
        return len(self._logits if self._few is None else self._few)

    @property
    def logits(self) -> Floats:
        self._spread()
        return self._logits

    @property
    def ids(self) -> Indexes:
        self._spread()
        return np.arange(len(self)) if self._is_whole else self._ids[len(self)]

    def id_at(self, place: int) -> int:
        if self._few is not None:
            return self._few_ids[place]
        return place if self._is_whole else int(self.ids[place])

    @property
    def largest(self) -> float:
        """The largest logit; NaN if one is, -inf if there is none."""
        if self._few is not None:
            return self._few[0]
        if self.is_sorted:
            return self.logits.item(0)
        if self._is_whole:
            return self._grouped()[-1]
        return float(self.logits.max(initial=-np.inf))

    def operand(self, number: float) -> Floats:
        """A float32 number (1,) for numpy, which makes an array of one of Python's."""
        self._single[0] = number
        return self._single

    def _double(self, number: float) -> Doubles:
        """A float64 one."""
        self._total[0] = number
        return self._total

    def keep(self, places: Collection[int] | Indexes, *, is_sorted: bool) -> None:
        """Drop all others; `places` gives the new order too."""
        wanted = places if isinstance(places, np.ndarray) else self._places.holding(places)
        n = len(wanted)
        ids, logits = self._spare_ids[n], self._spare[n]
        # To clip takes no copy, and clips nothing: these places are there.
        if self._is_whole:
            np.copyto(ids, wanted)
        else:
            self.ids.take(wanted, out=ids, mode="clip")
        self.logits.take(wanted, out=logits, mode="clip")
        self._held, self._spare = self._spare, self._held
        self._ids, self._spare_ids = self._spare_ids, self._ids
        self._logits = logits
        self._is_whole, self._is_own, self.is_sorted = False, True, is_sorted

    def keep_top(self, k: int) -> None:
        """Keep the `k` likeliest, falling; of equal ones those that come first."""
        if self._few is not None:
            del self._few[k:], self._few_ids[k:]
        elif self.is_sorted:
            self._logits = self._held[min(k, len(self))]
        elif isinstance(places := self._top(k), list):
            logits, ids = self._logits.data, self._ids[len(self)].data
            self._few = [logits[place] for place in places]
            self._few_ids = places if self._is_whole else [ids[place] for place in places]
            self._is_whole, self.is_sorted = False, True
        else:
            self.keep(places, is_sorted=True)

    def _spread(self) -> None:
        """The few as arrays again."""
        if self._few is not None:
            self._logits, self._few = self._held.holding(self._few), None
            self._ids.holding(self._few_ids)
            self._is_own = True

    def keep_from(self, bound: float, least: int = 0) -> None:
        """Keep the logits that are no less than a bound, and of all others as many of the likeliest
        as make `least`."""
        if self.is_sorted:
            falling = self._logits.data if self._few is None else self._few
            self.keep_top(max(bisect_right(falling, -bound, key=neg), least))
            return
        places = self._from(bound)
        if len(places) < least:
            self.keep_top(least)
        else:
            self.keep(places, is_sorted=False)

    def sort(self) -> None:
        self.keep_top(len(self))

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

    def writable(self) -> Floats:
        """The logits to change in place; the order may no longer hold afterwards."""
        given = self.logits
        if not self._is_own:
            self._logits = self._spare[len(self)]
            np.copyto(self._logits, given)
            self._held, self._spare = self._spare, self._held
            self._is_own = True
        self.is_sorted = self._is_grouped = False
        return self._logits

    def divide(self, divisor: float) -> None:
        """All logits, by a positive number: their order stays."""
        if self._few is not None:
            self._few = [logit / divisor for logit in self._few]
            return
        is_sorted, logits = self.is_sorted, self.writable()
        np.divide(logits, self.operand(divisor), out=logits)
        self.is_sorted = is_sorted

    def find(self, values: Mapping[int, float]) -> tuple[Indexes, Doubles]:
        """Where the tokens of `values` that are left stand, and their values."""
        if self._is_whole:
            return self._places.holding(values), self._values.holding(values.values())
        found = [(place, id_) for place, id_ in enumerate(self.ids.tolist()) if id_ in values]
        places = self._places.holding([place for place, _ in found])
        return places, self._values.holding([values[id_] for _, id_ in found])

    def penalise(
        self, places: Indexes, times: Doubles, *, repeat: float, frequency: float, presence: float
    ) -> None:
        """Lower the logits at these places: positive ones divided by `repeat`, others multiplied,
        in float32, less `times * frequency` and `presence`, in float64."""
        n, logits = len(places), self.writable()
        seen = logits.take(places, out=self._seen[n], mode="clip")
        if repeat != 1:
            divided = np.divide(seen, self.operand(repeat), out=self._other[n])
            np.multiply(seen, self.operand(repeat), out=seen)
            (np.minimum if repeat > 1 else np.maximum)(seen, divided, out=seen)
        if frequency or presence:
            np.multiply(times, self._double(frequency), out=times)
            lower = self._sums[n]
            np.copyto(lower, seen)
            np.subtract(lower, times, out=lower)
            np.subtract(lower, self._double(presence), out=lower)
            np.copyto(seen, lower, casting="same_kind")
        logits[places] = seen

    def weights(self) -> Floats:
        """exp(logit - largest logit) (n,); sums of them are to be taken in float64."""
        weights: Floats = self._weights[len(self)]
        np.subtract(self.logits, self.operand(self.largest), out=weights)
        return np.exp(weights, out=weights)

    def log_sum(self) -> float:
        """log of the sum of exp(logit), float64."""
        np.add.reduce(self.weights(), dtype=np.float64, out=self._total, keepdims=True)
        return self.largest + math.log(self._total.item())

    def reached(self, *, falling: bool = False) -> Many[float]:
        """Running sums of exp(logit - largest logit), float64, in order or from the largest on."""
        if self._few is not None:
            exp, largest = math.exp, self._few[0]
            return list(accumulate([exp(logit - largest) for logit in self._few]))
        weights = self.weights()
        if falling and not self.is_sorted:
            weights.sort()
            weights = weights[::-1]
        sums = self._sums[len(weights)]
        np.copyto(sums, weights)
        np.add.accumulate(sums, out=sums)
        return sums.data

    def probabilities(self) -> Doubles:
        p = self.weights().astype(np.float64)
        p /= p.sum()
        return p

    def _grouped(self) -> Many[float]:
        """The largest logits of the groups, rising: the k-th of them from the end is no more than
        the k-th largest logit of all. NaN, if one is, is the last."""
        if not self._is_grouped:
            _, rows, rest = self._fold(self._logits)
            np.maximum.reduce(rows, axis=0, out=self._maxima, initial=-np.inf)
            np.maximum(self._first_maxima, rest, out=self._first_maxima)
            self._maxima.sort()
            self._is_grouped = True
        return self._maxima.data

    def _fold(self, logits: Floats) -> tuple[Floats, Floats, Floats]:
        """A model's arrays are the same for each token, so these views are made once."""
        found = self._folded.get(id(logits))
        if found is None:
            if len(self._folded) == _N_FOLDED:
                self._folded.clear()
            n = len(logits) - len(logits) % self._n_groups
            found = logits, logits[:n].reshape(-1, self._n_groups), logits[n:]
            self._folded[id(logits)] = found
        return found

    def _top(self, k: int) -> list[int] | Indexes:
        """The places of the `k` largest, falling; equal ones by rising place."""
        n, logits = len(self), self._logits
        if n <= FEW:
            places: Collection[int] | Indexes = range(n)
        elif k >= n:
            return np.argsort(-logits, kind="stable")
        elif self._is_whole and k <= self._n_groups:
            places = self._from(self._grouped()[-k])
        else:
            places = self._from(np.partition(logits, n - k).item(n - k), few=k < FEW)
        if isinstance(places, np.ndarray):
            return places[np.argsort(-logits[places], kind="stable")[:k]]
        return sorted(places, key=logits.data.__getitem__, reverse=True)[:k]

    def _from(self, bound: float, *, few: bool = True) -> list[int] | Indexes:
        """The places of the logits that are no less than a bound, rising; a list if they are few,
        where that may be."""
        n = len(self)
        is_in = self._mask if n == self._n_vocab else self._mask[:n]
        np.greater_equal(self._logits, self.operand(bound), out=is_in)
        if few:
            places: list[int] = []
            find, place = self._is_in.find, -1
            for _ in range(FEW):
                place = find(True, place + 1, n)
                if place < 0:
                    return places
                places.append(place)
        return np.flatnonzero(is_in)
