"""What a stream notices of a long prompt that arrives while it decodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from xpuc.bench.cases import random_ids
from xpuc.bench.quantiles import Quantiles, quantiles
from xpuc.bench.subject import Progress, Subject
from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine
from xpuc.runtime.phases import StepRecord

_STREAM_PROMPT, _ALONE = 32, 64  # tokens: of the stream's own prompt, and it decodes undisturbed


@dataclass(frozen=True)
class Stall:
    """Gaps between the tokens of a stream, in ms.

    budget_ms       for the chunks of a prompt; None: no budget
    alone_ms        before the prompt came
    gap_ms          from then on to the prompt's first token
    first_token_ms  how long that one took
    smallest_chunk, largest_chunk  tokens of the prompt in a step, but for the last
    n_small         steps in which the budget left less than the least chunk
    """

    budget_ms: float | None
    prompt_tokens: int
    alone_ms: Quantiles
    gap_ms: Quantiles
    first_token_ms: float
    smallest_chunk: int
    largest_chunk: int
    n_small: int


class Stream:
    """One stream on an engine with nothing else to do, and a prompt that comes into it."""

    def __init__(
        self, engine: Engine, n_vocab: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine = engine
        self._n_vocab = n_vocab
        self._clock = clock
        self.records: list[StepRecord] = []
        self._times: list[float] = []
        engine.scheduler.on_step = self.records.append
        self._stream = engine.add_request(
            random_ids(n_vocab, _stream_prompt(engine.max_tokens), 0),
            temperature=0, ignore_eos=True,
        )  # fmt: skip

    def run(self, n_prompt: int, progress: Progress) -> Stall:
        """RequestError if the stream comes to the end of the context before the prompt is read."""
        while len(self._times) <= min(_ALONE, self.engine.max_tokens // 8):
            self._step()
        alone, n_steps = len(self._times), len(self.records)
        sent = self._clock()
        prompt = self.engine.add_request(
            random_ids(self._n_vocab, n_prompt, 1), temperature=0, max_tokens=1
        )
        first = None
        while first is None:
            first = self._step(prompt.id)
            progress(sum(each.prefill_tokens for each in self.records[n_steps:]), n_prompt)
        self.engine.cancel(self._stream)
        self.engine.step()
        steps = [each for each in self.records[n_steps:] if each.prefill_tokens]
        chunks = [each.prefill_tokens for each in steps[:-1] or steps]
        budget = self.engine.scheduler.chunks.budget_ms
        return Stall(
            budget_ms=budget if math.isfinite(budget) else None,
            prompt_tokens=n_prompt,
            alone_ms=_gaps(self._times[:alone]),
            gap_ms=_gaps(self._times[alone - 1 :]),
            first_token_ms=1000 * (first - sent),
            smallest_chunk=min(chunks),
            largest_chunk=max(chunks),
            n_small=sum(each.n_small for each in steps),
        )

    def _step(self, wanted: int | None = None) -> float | None:
        """When the request `wanted` got its first token, if it did in this step."""
        events = self.engine.step()
        now = self._clock()
        for event in events:
            if event.request.id == self._stream.id:
                self._times.append(now)
                if event.result is not None:
                    raise RequestError(
                        f"the stream was at its end after {len(self._times)} tokens, before the"
                        " prompt was read",
                        "measure with a shorter prompt, or compile with a larger context (--ctx)",
                    )
        found = any(event.request.id == wanted for event in events)
        return now if found else None


def _stream_prompt(context: int) -> int:
    return max(1, min(_STREAM_PROMPT, context // 8))


def _gaps(times: list[float]) -> Quantiles:
    return quantiles(1000 * (after - before) for before, after in pairwise(times))


def stall(subject: Subject, n_prompt: int, budget_ms: float, progress: Progress) -> Stall:
    """In an engine that has only been warmed up, so that it has to learn what a chunk takes."""
    context = min(subject.context, 2 * n_prompt + _STREAM_PROMPT + _ALONE)
    with subject.open(
        ctx=context, n_sequences=2, warm_rows=subject.max_chunk, chunk_budget_ms=budget_ms
    ) as engine:
        return Stream(engine, subject.n_vocab).run(n_prompt, progress)
