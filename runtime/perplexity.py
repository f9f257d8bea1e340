"""Perplexity of a text in windows, as llama.cpp's llama-perplexity counts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from xpuc.errors import RequestError
from xpuc.runtime.candidates import Candidates, Floats
from xpuc.runtime.logprobs import token_logprob

Read = Callable[[Many[int]], Iterator[tuple[int, Floats]]]  # Engine.teacher_forced


@dataclass(frozen=True, slots=True)
class Perplexity:
    """`nll[i]` holds those of window i's scored tokens, in nats."""

    nll: tuple[tuple[float, ...], ...]

    @property
    def n_scored(self) -> int:
        return sum(map(len, self.nll))

    @property
    def mean_nll(self) -> float:
        return math.fsum(value for window in self.nll for value in window) / self.n_scored

    @property
    def value(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def error(self) -> float:
        """The standard error of `value`."""
        mean = self.mean_nll
        squares = math.fsum((v - mean) ** 2 for window in self.nll for v in window)
        return self.value * math.sqrt(squares / max(1, self.n_scored - 1) / self.n_scored)


def perplexity(
    read: Read, ids: Many[int], window: int, most: int | None = None, bos_id: int | None = None
) -> Perplexity:
    """Of `ids` in windows of `window` tokens, at most `most` of them.

    Each window stands alone: its first half is context, the tokens of the second half but the
    first are scored. `bos_id` takes the place of each window's first token. RequestError if the
    text does not fill a window.
    """
    whole = len(ids) // window
    if not whole:
        raise RequestError(
            f"the text has {len(ids)} tokens, fewer than a window of {window}",
            "give a longer text, or a smaller --window",
        )
    found = []
    for i in range(min(whole, most or whole)):
        part = list(ids[i * window : (i + 1) * window])
        if bos_id is not None:
            part[0] = bos_id
        found.append(tuple(_second_half(read, part)))
    return Perplexity(tuple(found))


def _second_half(read: Read, ids: Many[int]) -> Iterator[float]:
    candidates = Candidates()
    for position, logits in read(ids):
        if len(ids) // 2 <= position < len(ids) - 1:
            chosen = token_logprob(candidates, logits, ids[position + 1], 0).logprob
            assert chosen is not None
            yield -chosen
