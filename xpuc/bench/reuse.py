"""Time to first token of a prompt that is new, shares its beginning, or is found on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xpuc.bench.cases import random_ids
from xpuc.bench.subject import Progress, Subject
from xpuc.runtime.engine import Engine

_OWN = 16  # tokens that follow the shared ones, different in each prompt


@dataclass(frozen=True)
class FirstToken:
    """ms to the first token, and prompt tokens that were found in memory or in the store."""

    ms: float
    found_tokens: int
    stored_tokens: int


@dataclass(frozen=True)
class Reuse:
    """Three prompts that begin with the same tokens: the first one, one after it, and one after a
    restart with an empty pool and the store (None: there is no store)."""

    prefix_tokens: int
    prompt_tokens: int
    cold: FirstToken
    shared: FirstToken
    stored: FirstToken | None


def reuse(
    subject: Subject, n_prefix: int, store: Path | None, round_: int, progress: Progress
) -> Reuse:
    """`store`: an empty folder. The restart is another engine that has loaded everything again."""
    n_own = min(_OWN, n_prefix)
    n = n_prefix + n_own
    prefix = random_ids(subject.n_vocab, n_prefix, 3 * round_)
    prompts = [prefix + random_ids(subject.n_vocab, n_own, 3 * round_ + i) for i in range(3)]

    def opened() -> Engine:
        return subject.open(ctx=n + 1, n_sequences=1, warm_rows=subject.max_chunk, store=store)

    with opened() as engine:
        cold = _first_token(engine, prompts[0])
        progress(1, 3)
        shared = _first_token(engine, prompts[1])
        progress(2, 3)
    stored = None
    if store is not None:
        with opened() as engine:
            stored = _first_token(engine, prompts[2])
    progress(3, 3)
    return Reuse(n_prefix, n, cold, shared, stored)


def _first_token(engine: Engine, prompt: list[int]) -> FirstToken:
    counters = engine.kv.counters
    found, stored = counters.hit_tokens, counters.store_tokens
    result = engine.generate(prompt, temperature=0, max_tokens=1)
    return FirstToken(
        result.timings.first_token_ms, counters.hit_tokens - found, counters.store_tokens - stored
    )
