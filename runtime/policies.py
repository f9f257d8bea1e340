"""In which order sequences are served: the scheduler's policies, as ranks and picks.

A smaller rank is served first and yields last; of those that run, the largest rank is preempted.
A pick says which of the waiting, kept by rank, comes in next. Preempted sequences come before all
of them under every policy, in the order they were preempted.

fcfs      by arrival
priority  by Request.priority, the smallest first; equals by arrival. Strict: a stream of urgent
          requests keeps the others waiting, as asked
lpm       the waiting one with the longest cached prefix, of the first `LPM_WINDOW`; one that was
          passed over `LPM_PATIENCE` times at the head of the queue goes first
vllm      by arrival, planned the way vLLM does: see running_first.py
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Literal, NamedTuple

from xpuc.errors import RequestError, nearest
from xpuc.runtime.sequence import Request, Sequence

PolicyName = Literal["fcfs", "priority", "lpm", "vllm"]
LPM_WINDOW = 64
LPM_PATIENCE = 32

CachedTokens = Callable[[Sequence], int]


class Policy(NamedTuple):
    rank: Callable[[Request], tuple[int, int]]
    pick: Callable[[Many[Sequence], CachedTokens], int]
    is_running_first: bool = False


def policy_of(name: str) -> Policy:
    """The policy called `name`; RequestError if there is none."""
    if name not in POLICIES:
        raise RequestError(f"unknown scheduling policy {name!r}", nearest(name, POLICIES))
    return POLICIES[name]


def _by_age(request: Request) -> tuple[int, int]:
    return 0, request.id


def _by_priority(request: Request) -> tuple[int, int]:
    return request.priority, request.id


def _first(waiting: Many[Sequence], n_cached: CachedTokens) -> int:
    return 0


def _longest_match(waiting: Many[Sequence], n_cached: CachedTokens) -> int:
    if waiting[0].n_overtaken >= LPM_PATIENCE:
        return 0
    best, most = 0, -1
    for index in range(min(len(waiting), LPM_WINDOW)):
        n = n_cached(waiting[index])
        if n > most:
            best, most = index, n
    return best


POLICIES = {
    "fcfs": Policy(_by_age, _first),
    "priority": Policy(_by_priority, _first),
    "lpm": Policy(_by_age, _longest_match),
    "vllm": Policy(_by_age, _first, is_running_first=True),
}
