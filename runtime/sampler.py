"""From logits to a token: an ordered chain of samplers, one function each.

The meaning of every sampler and the order are llama.cpp's. A chain always has the same members:
`logit-bias`, then those the request ordered, then `dist`; one that its parameters switch off is
skipped and printed as `?name`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xpuc.artifact import Sampling, Tail
from xpuc.errors import XpucError
from xpuc.runtime.candidates import Candidates, Floats, Mask
from xpuc.runtime.device_sampler import COLDEST, GREEDY, Randoms, sampling_of
from xpuc.runtime.dry import Breakers, dry_penalties, has_dry
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.runtime.scratch import float32

DAMAGED = "compare the artifact's files (xpuc inspect --verify), or compile with --activations f32"


class SamplingError(XpucError):
    """No token can be chosen; its request fails, and no other."""


class LogitsError(SamplingError):
    """Logits that are not numbers."""


class DeadEndError(SamplingError):
    """Every token is forbidden."""


@dataclass(slots=True)
class Draw:
    """What a sampler may look at: the request's options, its tokens so far, its random numbers."""

    params: SamplingParams
    tokens: Sequence[int]
    random: Randoms
    breakers: Breakers


@dataclass(frozen=True, slots=True)
class Sampler:
    """`name` is what a request orders, `label` what the chain line prints."""

    name: str
    label: str
    is_active: Callable[[SamplingParams], bool]
    apply: Callable[[Candidates, Draw], None]
    keeps_likeliest: bool  # never drops the likeliest token nor makes another one likelier


def logit_bias(candidates: Candidates, draw: Draw) -> None:
    places, biases = candidates.find(draw.params.logit_bias)
    candidates.writable()[places] += biases.astype(np.float32)


def penalties(candidates: Candidates, draw: Draw) -> None:
    """Repeat (divides a positive logit, multiplies others), frequency and presence penalty."""
    params = draw.params
    last_n = params.penalty_last_n if params.penalty_last_n >= 0 else len(draw.tokens)
    counts = Counter(draw.tokens[max(len(draw.tokens) - last_n, 0) :])
    candidates.penalise(
        *candidates.find(counts),
        repeat=params.repeat_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )


def dry(candidates: Candidates, draw: Draw) -> None:
    costs = dry_penalties(draw.tokens, draw.params, draw.breakers)
    if costs:
        places, amounts = candidates.find(costs)
        candidates.writable()[places] -= amounts.astype(np.float32)


def top_n_sigma(candidates: Candidates, draw: Draw) -> None:
    """Keep logits within n standard deviations of the largest; -inf ones do not count."""
    logits = candidates.logits
    possible = logits if logits.min() > -np.inf else logits[logits > -np.inf]
    mean = possible.mean(dtype=np.float64)
    deviation = math.sqrt(np.square(possible - np.float32(mean)).mean(dtype=np.float64))
    bound = possible.max() - np.float32(draw.params.top_n_sigma * deviation)
    candidates.keep_from(float(bound))


def top_k(candidates: Candidates, draw: Draw) -> None:
    candidates.keep_top(draw.params.top_k)


def typ_p(candidates: Candidates, draw: Draw) -> None:
    """Keep the tokens whose surprise is nearest to the expected one, up to probability p.

    Source: Meister et al., "Locally Typical Sampling", 2022.
    """
    p = candidates.probabilities()
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = (p[p > 0] * surprise[p > 0]).sum()
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(p[order].cumsum(), draw.params.typical_p, side="right")) + 1
    candidates.keep(order[: max(n, draw.params.min_keep)], is_sorted=False)


def top_p(candidates: Candidates, draw: Draw) -> None:
    """Keep the shortest run of likeliest tokens whose probabilities reach p."""
    reached = candidates.reached(falling=True)
    n = bisect_left(reached, draw.params.top_p * reached[-1]) + 1
    candidates.keep_top(max(n, draw.params.min_keep))


def min_p(candidates: Candidates, draw: Draw) -> None:
    """Keep the tokens at least p times as likely as the likeliest."""
    bound = float32(candidates.largest + float32(math.log(draw.params.min_p)))
    candidates.keep_from(bound, least=draw.params.min_keep)


def xtc(candidates: Candidates, draw: Draw) -> None:
    """Sometimes drop all tokens above the threshold but the least likely of them."""
    chance = draw.random.random()
    if chance > draw.params.xtc_probability or len(candidates) < 2:
        return
    candidates.sort()
    n_above = int((candidates.probabilities() >= draw.params.xtc_threshold).sum())
    if n_above > 1 and len(candidates) - (n_above - 1) >= draw.params.min_keep:
        candidates.keep(np.arange(n_above - 1, len(candidates)), is_sorted=True)


def temperature(candidates: Candidates, draw: Draw) -> None:
    if draw.params.is_greedy:
        candidates.keep_top(1)
        return
    candidates.divide(max(_temperature_of(candidates, draw.params), COLDEST))


def _temperature_of(candidates: Candidates, params: SamplingParams) -> float:
    """With a range, the higher the more evenly the probability is spread.

    Source: "Entropy based dynamic temperature" (kalomaze, llama.cpp pull request 4972).
    """
    if params.dynatemp_range <= 0:
        return params.temperature
    p = candidates.probabilities()
    p = p[p > 0]
    if len(p) < 2:
        return params.temperature
    entropy = -(p * np.log(p)).sum() / math.log(len(p))
    low = max(params.temperature - params.dynatemp_range, 0.0)
    high = params.temperature + params.dynatemp_range
    return float(low + (high - low) * max(entropy, 0.0) ** params.dynatemp_exponent)


def dist(candidates: Candidates, draw: Draw) -> int:
    """Draw one of them, at its probability: always one random number, whatever is left."""
    reached = candidates.reached()
    place = bisect_right(reached, draw.random.random() * reached[-1])
    return candidates.id_at(min(place, len(candidates) - 1))


def _has_penalties(params: SamplingParams) -> bool:
    is_neutral = params.repeat_penalty == 1 and not (
        params.frequency_penalty or params.presence_penalty
    )
    return params.penalty_last_n != 0 and not is_neutral


def _has_xtc(params: SamplingParams) -> bool:
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5


def _has_temperature(params: SamplingParams) -> bool:
    return params.temperature != 1 or params.dynatemp_range > 0


SAMPLERS: tuple[Sampler, ...] = (
    Sampler("penalties", "penalties", _has_penalties, penalties, False),
    Sampler("dry", "dry", has_dry, dry, False),
    Sampler("top_n_sigma", "top-n-sigma", lambda p: p.top_n_sigma > 0, top_n_sigma, True),
    Sampler("top_k", "top-k", lambda p: p.top_k > 0, top_k, True),
    Sampler("typ_p", "typical", lambda p: p.typical_p < 1, typ_p, False),
    Sampler("top_p", "top-p", lambda p: p.top_p < 1, top_p, True),
    Sampler("min_p", "min-p", lambda p: p.min_p > 0, min_p, True),
    Sampler("xtc", "xtc", _has_xtc, xtc, False),
    Sampler("temperature", "temp-ext", _has_temperature, temperature, True),
)


class Chain:
    """The samplers of one request and its random numbers: the same alone or in a batch.

    tail        what a step has to give at least for a token of it to be chosen
    sampling    what a device is told that chooses one; None where it cannot
    candidates  what it chooses in; chains that choose one after another may share it
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int = 0,
        breakers: Breakers | None = None,
        candidates: Candidates | None = None,
    ) -> None:
        by_name = {sampler.name: sampler for sampler in SAMPLERS}
        self.params = params
        self._members = tuple(by_name[name] for name in params.order)
        self._active = tuple(member for member in self._members if member.is_active(params))
        self._random = Randoms(seed)
        self._breakers = breakers or {}
        self.candidates = Candidates() if candidates is None else candidates
        self.is_argmax = params.is_greedy and all(each.keeps_likeliest for each in self._active)
        self.tail: Tail = "logits"
        self.sampling: Sampling | None = None
        if self.is_argmax and not params.logit_bias:
            self.tail, self.sampling = "greedy", GREEDY
        elif sampling := sampling_of(params, [each.name for each in self._active]):
            self.tail, self.sampling = "sampled", sampling

    def describe(self) -> str:
        """One line: every member in order, `?` before those that are switched off."""
        bias = "logit-bias" if self.params.logit_bias else "?logit-bias"
        names = [("" if each in self._active else "?") + each.label for each in self._members]
        return " -> ".join(["logits", bias, *names, "?dist" if self.params.is_greedy else "dist"])

    def ahead(self, n: int) -> float:
        """The random number that a device draws a token with, the one after `n` others; any for
        one that is not drawn."""
        return 0.0 if self.is_argmax else self._random.ahead(n)

    def drawn(self) -> None:
        """A device has chosen a token."""
        if not self.is_argmax:
            self._random.random()

    def sample(
        self,
        logits: Floats,
        tokens: Sequence[int],
        banned: Sequence[int] = (),
        allowed: Mask | None = None,
    ) -> int:
        """The next token after `tokens`, from logits (n_vocab,).

        One that `allowed` (n_vocab,) is True for (None: any), none of `banned`. LogitsError if the
        largest logit is no finite number, DeadEndError if every token is forbidden.
        """
        candidates = self.candidates
        candidates.begin(logits)
        if not math.isfinite(candidates.largest):
            raise LogitsError(f"the largest logit is {candidates.largest}", DAMAGED)
        draw = Draw(self.params, tokens, self._random, self._breakers)
        if allowed is not None or banned or self.params.logit_bias:
            self._forbid(draw, banned, allowed)
        if not self.is_argmax:
            for member in self._active:
                member.apply(candidates, draw)
        if not self.params.is_greedy:
            return dist(candidates, draw)
        candidates.keep_top(1)
        return candidates.id_at(0)

    def _forbid(self, draw: Draw, banned: Sequence[int], allowed: Mask | None) -> None:
        """All that comes before the ordered samplers: the grammar, bans and biases."""
        candidates = self.candidates
        if allowed is not None:
            candidates.restrict(allowed)
        if banned:
            places, _ = candidates.find(dict.fromkeys(banned, 0.0))
            candidates.writable()[places] = -np.inf
        if self.params.logit_bias:
            logit_bias(candidates, draw)
        if candidates.largest == -np.inf:
            raise DeadEndError("every token is forbidden", "forbid fewer tokens")
