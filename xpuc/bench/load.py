"""A workload on a real engine: how long requests wait, and whether all end and nothing leaks."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from xpuc.bench.quantiles import Quantiles, quantiles
from xpuc.bench.subject import Progress, Subject
from xpuc.bench.workload import LONGEST, Arrival, workload
from xpuc.runtime.engine import Engine, Event
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.sequence import Request

_POOL_PART = 0.6  # of the K/V that max_batch requests of mean length want
_MS = 1000.0  # in a second


@dataclass(frozen=True)
class LoadResult:
    """Times in ms, of requests that got a token, from when each was due: if the engine is late to
    take one in, that counts.

    ended           requests by finish reason
    queue_wait_ms   to a request's first step
    first_token_ms  to its first token
    per_token_ms    mean of a request's gaps, one value a request (vLLM's TPOT)
    token_gap_ms    between two tokens of a request, all of them (vLLM's ITL)
    plan_ms         of a step: who runs, blocks for it, what is evicted and found
    step_ms         of a step in all
    n_small         steps in which the chunk budget left a prompt fewer tokens than the least chunk
    hit_rate        of the tokens of all that began to run, those found in the pool
    evictions       cached blocks that were allocated for something else
    pool_blocks     for the layers without a window, and what max_batch requests of mean length
                    want of them
    n_leaked        blocks that have an owner at the end
    """

    n_requests: int
    ended: dict[str, int]
    seconds: float
    prompt_tokens: int
    generated_tokens: int
    queue_wait_ms: Quantiles
    first_token_ms: Quantiles
    per_token_ms: Quantiles
    token_gap_ms: Quantiles
    plan_ms: Quantiles
    step_ms: Quantiles
    n_steps: int
    n_preempted: int
    n_resumed: int
    n_small: int
    hit_rate: float
    evictions: int
    pool_blocks: int
    wanted_blocks: int
    n_leaked: int

    @property
    def generated_tok_s(self) -> float:
        return self.generated_tokens / self.seconds


@dataclass
class Client:
    """Whoever sent one request; `times` (s) are those of its tokens."""

    arrival: Arrival
    request: Request
    times: list[float] = field(default_factory=list)
    prompt_s: float = 0.0  # from the first step to the first token

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


class Load:
    """Sends each request when it is due, whatever the engine is at (an open loop)."""

    def __init__(
        self,
        engine: Engine,
        arrivals: Iterable[Arrival],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine = engine
        self.clients: dict[int, Client] = {}  # by request
        self.ended: Counter[str] = Counter()
        self.records: list[StepRecord] = []
        self.seconds = 0.0
        self._due = deque(sorted(arrivals, key=lambda each: each.at_s))
        self._clock, self._sleep = clock, sleep
        engine.scheduler.on_step = self.records.append

    def run(self, progress: Progress) -> None:
        """Until all have ended."""
        engine, due = self.engine, self._due
        total, start = len(due), self._clock()
        while due or engine.has_work:
            now = self._clock() - start
            while due and due[0].at_s <= now:
                self._send(due.popleft())
            if not engine.has_work:
                self._sleep(due[0].at_s - now)
                continue
            events = engine.step()
            self.seconds = self._clock() - start
            for event in events:
                self._take(event, self.seconds)
            progress(self.ended.total(), total)

    def _send(self, arrival: Arrival) -> None:
        request = self.engine.add_request(
            arrival.prompt, max_tokens=arrival.max_tokens, temperature=0, ignore_eos=True
        )
        self.clients[request.id] = Client(arrival, request)

    def _take(self, event: Event, now: float) -> None:
        client = self.clients[event.request.id]
        if event.chunk.id is not None:
            client.times.append(now)
        if event.result is not None:
            self.ended[event.result.finish_reason] += 1
            client.prompt_s = event.result.timings.prompt_ms / _MS
        elif len(client.times) == client.arrival.cancel_after:
            self.engine.cancel(client.request)

    def result(self) -> LoadResult:
        engine, records = self.engine, self.records
        served = [each for each in self.clients.values() if each.times]
        kv, sums = engine.kv, engine.scheduler.counters.sums
        whole = next((each for each in kv.groups if not each.window), kv.groups[0])
        several = [each for each in served if len(each.times) > 1]
        wanted = sum(each.arrival.n_tokens for each in served) / max(1, len(served))
        return LoadResult(
            n_requests=len(self.clients),
            ended=dict(self.ended),
            seconds=self.seconds,
            prompt_tokens=sum(len(each.arrival.prompt) for each in served),
            generated_tokens=sum(len(each.times) for each in served),
            queue_wait_ms=_ms(each.first_token_s - each.prompt_s for each in served),
            first_token_ms=_ms(each.first_token_s for each in served),
            per_token_ms=_ms(sum(each.gaps_s) / len(each.gaps_s) for each in several),
            token_gap_ms=_ms(gap for each in several for gap in each.gaps_s),
            plan_ms=quantiles((each.admission_ns + each.reserve_ns) / 1e6 for each in records),
            step_ms=quantiles(each.total_ns / 1e6 for each in records),
            n_steps=len(records),
            n_preempted=sums["n_preempted"],
            n_resumed=sums["n_resumed"],
            n_small=sums["n_small"],
            hit_rate=kv.counters.hit_tokens / max(1, kv.counters.query_tokens),
            evictions=sum(each.pool.counters.evictions for each in kv.groups),
            pool_blocks=whole.pool.n_blocks,
            wanted_blocks=round(engine.model.max_batch * wanted / kv.block_tokens),
            n_leaked=kv.n_used,
        )


def _ms(seconds: Iterable[float]) -> Quantiles:
    return quantiles(_MS * each for each in seconds)


def arrivals_of(subject: Subject, n: int, rate: float, seed: int) -> list[Arrival]:
    """A workload that the context has room for."""
    longest = min(LONGEST, subject.context)
    return workload(n, rate, n_vocab=subject.n_vocab, longest=longest, seed=seed)


def pool_sizes(subject: Subject, arrivals: list[Arrival]) -> dict[str, int]:
    """ctx and n_sequences of a K/V pool that holds the longest request, and less of the others
    than could run together: so that some are preempted."""
    longest = max(each.n_tokens for each in arrivals) + 1
    mean = sum(each.n_tokens for each in arrivals) / len(arrivals)
    wanted = _POOL_PART * subject.max_batch * mean
    return {"ctx": min(longest, subject.context), "n_sequences": max(1, round(wanted / longest))}
