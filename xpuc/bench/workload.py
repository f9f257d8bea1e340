"""Requests as a server gets them: of mixed lengths, some beginning alike, some given up."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LONGEST = 512  # tokens, answer included, unless the context holds fewer
_N_SYSTEMS, _SYSTEM_PART = 3, 8  # prompts that are shared, and what part of LONGEST one has
_P_SHARED, _P_CANCELLED = 0.6, 0.1
_LEAST = 4  # tokens of a prompt of its own, and of an answer


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes (seconds from the start), and after how many tokens of its answer
    whoever asked goes away (None: never)."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    cancel_after: int | None

    @property
    def n_tokens(self) -> int:
        """At its end, if it is not given up."""
        return len(self.prompt) + self.max_tokens


def workload(n: int, rate: float, *, n_vocab: int, longest: int, seed: int) -> list[Arrival]:
    """`n` requests of at most `longest` tokens, `rate` a second, the same for the same arguments.

    They come at random and independently (Poisson; math.inf: all at once). Own prompts and answers
    are log-uniform, up to 1/2 and 1/5 of `longest`; 3 of 5 prompts begin with one of three texts
    of 1/8 of it; one in ten is given up somewhere in its answer.
    """
    draw = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(n_vocab) for _ in range(count))

    def length(most: int) -> int:
        return round(math.exp(draw.uniform(math.log(min(_LEAST, most)), math.log(most))))

    systems = [ids(longest // _SYSTEM_PART) for _ in range(_N_SYSTEMS)]
    arrivals = []
    at_s = 0.0
    for _ in range(n):
        prompt = draw.choice(systems) if draw.random() < _P_SHARED else ()
        prompt += ids(length(longest // 2))
        n_answer = max(2, length(longest // 5))
        is_cancelled = draw.random() < _P_CANCELLED
        cancel_after = draw.randrange(1, n_answer) if is_cancelled else None
        arrivals.append(Arrival(at_s, prompt, n_answer, cancel_after))
        at_s += draw.expovariate(rate) if math.isfinite(rate) else 0.0
    return arrivals
