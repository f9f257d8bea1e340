"""How long a step will take, learned from the steps before it. Plain Python, a few µs a step.

A step's time is taken as

    a + b * decode rows + c * chunk tokens + d * attended tokens

with a, b, c, d >= 0 by least squares of the relative error, times a factor for the size class of
its chunk (powers of two), because no machine is linear over all sizes. A factor is forgotten while
chunks of other sizes run: else one that was seen in a bad moment would never be tried again. A
relative error bounds what a stall of the machine can do: however long a step took, its error is at
most 1.

Each class keeps sums over its own last steps, some `1 / (1 - _KEEP)` of them, so thousands of
decode steps in between do not wash out what is known about chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_KEEP = 0.95  # of a class's sums, with each of its steps
_FACTOR_RATE = 0.2  # of a class's factor, towards the newest step
_FORGET_CHUNKS = 16  # chunks of other sizes after which half of a factor is forgotten
_TRUSTED_STEPS = 8  # of a class, before which nothing counts as unusual
_FIT_STEPS = 8  # between two fits, once a class is trusted
_UNUSUAL = 0.5  # log ratio above which a step counts less
_MOST_UNUSUAL = math.log(3)  # log ratio that a step is clipped to
_N_TERMS, _N_SUMS = 4, 14
# Where the sum of the product of two terms is among the sums.
_PRODUCTS = ((4, 5, 6, 7), (5, 8, 9, 10), (6, 9, 11, 12), (7, 10, 12, 13))


@dataclass(slots=True)
class Work:
    """A step's work: `attended` is the context read, summed over its rows."""

    decode_rows: int = 0
    chunk_tokens: int = 0
    attended: int = 0

    def with_chunk(self, n: int, start: int) -> Work:
        """The same and `n` more tokens of a prompt from position `start`."""
        attended = self.attended + n * start + n * (n + 1) // 2
        return Work(self.decode_rows, self.chunk_tokens + n, attended)


class CostModel:
    """Predicts steps in ns; 0 until it has seen one."""

    def __init__(self) -> None:
        self.n_steps = 0
        self._classes: dict[int, _Class] = {}
        self._terms = [0.0] * _N_TERMS
        self._fitted = 0  # n_steps then
        self._n_chunks = 0  # steps with one

    def n_seen(self, chunk_tokens: int) -> int:
        """Steps seen with a chunk of about that size."""
        known = self._classes.get(chunk_tokens.bit_length())
        return known.n_steps if known else 0

    def last_seen(self, chunk_tokens: int) -> int:
        """`n_steps` when the last of them was seen; 0 if none was."""
        known = self._classes.get(chunk_tokens.bit_length())
        return known.last if known else 0

    def largest_seen(self) -> int:
        """The least chunk of the largest size class that was seen; 0 if there was no chunk."""
        return 1 << top - 1 if (top := max(self._classes, default=0)) else 0

    def predict(self, work: Work) -> float:
        a, b, c, d = self._terms
        ns = a + b * work.decode_rows + c * work.chunk_tokens + d * work.attended
        known = self._classes.get(work.chunk_tokens.bit_length())
        if known is None:
            return ns
        return ns * (self._faded(known) if work.chunk_tokens else known.factor)

    def fitting(self, ns: float, decoding: Work, start: int, most: int) -> int:
        """The largest chunk from position `start` on, of up to `most` tokens, with which a step
        that has no other is predicted to take no longer than `ns`; 0 if none is."""
        a, b, c, d = self._terms
        others = a + b * decoding.decode_rows + d * decoding.attended
        # n tokens take linear * n + square * n * n.
        linear, square = c + d * (start + 0.5), d / 2
        while most:
            known = self._classes.get(most.bit_length())
            left = ns / (1.0 if known is None else self._faded(known)) - others
            if linear * most + square * most * most <= left:
                return most
            least = 1 << most.bit_length() - 1  # of the size class
            if left > 0:
                n = int(2 * left / (linear + math.sqrt(linear * linear + 4 * square * left)))
                if n >= least:
                    return n
            most = least - 1
        return 0

    def observe(self, work: Work, ns: float) -> None:
        """A step of this work took `ns`."""
        ns = max(ns, 1.0)
        key = work.chunk_tokens.bit_length()
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = _Class()
        weight = 1.0
        if known.n_steps >= _TRUSTED_STEPS:
            expected = self.predict(work)
            error = math.log(ns / expected) if expected > 0 else 0.0
            if abs(error) > _UNUSUAL:
                clipped = max(-_MOST_UNUSUAL, min(_MOST_UNUSUAL, error))
                ns = ns if clipped == error else expected * math.exp(clipped)
                weight = _UNUSUAL / abs(clipped)
        self.n_steps += 1
        known.last = self.n_steps
        if work.chunk_tokens:
            known.factor = self._faded(known)
            self._n_chunks += 1
            known.last_chunk = self._n_chunks
        known.add(work, ns, weight)
        if known.n_steps < _TRUSTED_STEPS or self.n_steps - self._fitted >= _FIT_STEPS:
            self._fitted = self.n_steps
            self._terms = self._fit()
        expected = self.predict(work)
        if known.n_steps > 1 and expected > 0:
            error = max(-_UNUSUAL, min(_UNUSUAL, math.log(ns / expected)))
            known.factor *= math.exp(_FACTOR_RATE * error)

    def _faded(self, known: _Class) -> float:
        """The factor of a class of chunks, nearer to 1 the longer it was not seen."""
        age = self._n_chunks - known.last_chunk
        return math.pow(known.factor, math.pow(0.5, age / _FORGET_CHUNKS))

    def _fit(self) -> list[float]:
        """Least squares over all classes; a term that comes out negative is 0, and the rest fit
        without it, so that more work is never predicted to take less time."""
        sums = [sum(each) for each in zip(*[c.sums for c in self._classes.values()], strict=True)]
        active = [i for i in range(_N_TERMS) if sums[_PRODUCTS[i][i]] > 0]
        while active:
            found = _solved(sums, active)
            worst = min(range(len(active)), key=found.__getitem__)
            if found[worst] >= 0:
                terms = [0.0] * _N_TERMS
                for i, value in zip(active, found, strict=True):
                    terms[i] = value
                return terms
            del active[worst]
        return [0.0] * _N_TERMS


class _Class:
    """Steps with chunks of one size class: sums of the normal equations, and their factor.

    sums  of the right sides, then of the products of each two terms, see _PRODUCTS
    """

    __slots__ = ("factor", "last", "last_chunk", "n_steps", "sums")

    def __init__(self) -> None:
        self.n_steps = self.last = self.last_chunk = 0
        self.factor = 1.0
        self.sums = [0.0] * _N_SUMS

    def add(self, work: Work, ns: float, weight: float) -> None:
        a, b, c = 1 / ns, work.decode_rows / ns, work.chunk_tokens / ns
        d = work.attended / ns
        wa, wb, wc, wd = weight * a, weight * b, weight * c, weight * d
        new = (
            wa, wb, wc, wd,
            wa * a, wa * b, wa * c, wa * d, wb * b, wb * c, wb * d, wc * c, wc * d, wd * d,
        )  # fmt: skip
        self.sums = [_KEEP * old + each for old, each in zip(self.sums, new, strict=True)]
        self.n_steps += 1


def _solved(sums: list[float], active: list[int]) -> list[float]:
    """The terms `active` of the normal equations, each scaled to 1 on the diagonal, by elimination.

    A little is added to the diagonal, so terms that always moved together share what they explain.
    """
    scale = [1 / math.sqrt(sums[_PRODUCTS[i][i]]) for i in active]
    rows = [
        [sums[_PRODUCTS[i][j]] * s * t for j, t in zip(active, scale, strict=True)] + [sums[i] * s]
        for i, s in zip(active, scale, strict=True)
    ]
    n = len(active)
    for k in range(n):
        rows[k][k] += 1e-6
    for k in range(n):
        pivot = rows[k]
        for row in rows[k + 1 :]:
            ratio = row[k] / pivot[k]
            for j in range(k, n + 1):
                row[j] -= ratio * pivot[j]
    found = [0.0] * n
    for k in reversed(range(n)):
        rest = sum(rows[k][j] * found[j] for j in range(k + 1, n))
        found[k] = (rows[k][n] - rest) / rows[k][k]
    return [value * s for value, s in zip(found, scale, strict=True)]
