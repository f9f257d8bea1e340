"""The chains that a device runs itself, so that a step gives back a token and not its logits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from xpuc.artifact import TOP_K, Sampling
from xpuc.runtime.sampling_params import SamplingParams

GREEDY = Sampling(top_p=1.0, temperature=0.0, min_p=-math.inf, top_k=1)
COLDEST = 1e-8  # finer than float32 logits; anything lower would overflow
_HOTTEST = 1e38  # about the end of float32
_ORDER = ("top_k", "top_p", "min_p", "temperature")


def sampling_of(params: SamplingParams, active: Sequence[str]) -> Sampling | None:
    """What a device is told of the chain of these samplers, in order; None if it has no such chain.

    It runs those of `_ORDER`, of which top_k has to be there. A greedy chain is not its business.
    """
    is_known = tuple(active) == tuple(name for name in _ORDER if name in active)
    keeps_few = "top_k" in active and params.top_k <= TOP_K and params.min_keep <= 1
    is_fixed = params.temperature > 0 and params.dynatemp_range <= 0 and not params.logit_bias
    if not (is_known and keeps_few and is_fixed):
        return None
    return Sampling(
        top_p=params.top_p if "top_p" in active else 1.0,
        temperature=(
            min(max(params.temperature, COLDEST), _HOTTEST) if "temperature" in active else 1.0
        ),
        min_p=math.log(params.min_p) if "min_p" in active else -math.inf,
        top_k=params.top_k,
    )


class Randoms:
    """The random numbers of a request in [0, 1), in order: the same alone or in a batch."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._seen: deque[float] = deque()  # that were asked for ahead of their turn

    def random(self) -> float:
        """The next one."""
        return self._seen.popleft() if self._seen else self._generator.random()

    def ahead(self, n: int) -> float:
        """The one that comes after `n` others; its turn is still to come."""
        while len(self._seen) <= n:
            self._seen.append(self._generator.random())
        return self._seen[n]
