"""What a step costs beside the model: the scheduler alone, and the whole engine."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from xpuc.bench.cases import random_ids
from xpuc.bench.quantiles import Quantiles, quantiles
from xpuc.bench.subject import Progress, Subject
from xpuc.errors import RequestError
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.engine import Engine
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.plan import Plan
from xpuc.runtime.scheduler import Scheduler
from xpuc.runtime.sequence import Request, Sequence

N_RUNNING = 64
_BLOCK_TOKENS, _MAX_CHUNK, _CONTEXT = 16, 512, 2048
_LEAST_PROMPT, _MOST_PROMPT = 100, 400  # tokens
_SYSTEM = tuple(range(96))  # what every other prompt begins with
_LEAST_ANSWER, _MOST_ANSWER = 32, 256
# Of a step of the model that computes nothing, so that the chunk budget has something to weigh.
_STEP_NS, _ROW_NS = 20_000_000, 1_000_000
_PROMPT, _WARM_STEPS = 16, 8
_PATIENCE = 20  # steps for each that is wanted


@dataclass(frozen=True)
class Overhead:
    """Time that steps with `n_running` requests take beside the model: of the scheduler alone the
    processor's, so that other work on the machine does not count, of the engine the clock's.

    of_step  median of the part of its step that it is; None where no model runs
    """

    what: str
    n_running: int
    us: Quantiles
    of_step: float | None = None


class NullServer:
    """The real scheduler and block pool, and a model that computes nothing and takes no memory.

    With `arrivals` requests end after some tokens, and another one comes for each; half of the
    prompts begin alike. Without, all go on for as long as there are steps.
    """

    def __init__(self, n_steps: int, *, arrivals: bool, seed: int = 1) -> None:
        self._now = 0
        self._arrivals = False
        self._random = random.Random(seed)
        most = _MOST_PROMPT + max(n_steps, _MOST_ANSWER) + _CONTEXT
        self.scheduler = Scheduler(
            KvBlocks([BlockPool(N_RUNNING * most // _BLOCK_TOKENS, _BLOCK_TOKENS)]),
            max_batch=N_RUNNING, max_chunk=_MAX_CHUNK, max_context=most, clock=lambda: self._now,
        )  # fmt: skip
        self._ends: dict[Sequence, int] = {}  # tokens at which it ends
        self._watch = _Stopwatch()
        self._n_requests = 0
        for _ in range(N_RUNNING):
            self._arrive()
        while any(each.n_pending != 1 for each in self._ends):
            self.step()
        self._arrivals = arrivals
        self._ends = {each: len(each.tokens) + self._n_answer() for each in self._ends}

    def step(self) -> float:
        """Microseconds of the processor that a step takes the scheduler and the pool."""
        scheduler, watch = self.scheduler, self._watch
        watch.ns = 0
        with watch:
            plan = scheduler.plan()
        model_ns = _STEP_NS + _ROW_NS * plan.record.n_rows
        self._now += model_ns
        with watch:
            scheduler.complete(plan)
        self._sample(plan)
        with watch:
            scheduler.end_step(plan)
        return watch.ns / 1000

    def _sample(self, plan: Plan) -> None:
        for span in plan.spans:
            sequence = span.sequence
            if span.is_last:
                sequence.tokens.append(self._random.randrange(1000))
                if self._arrivals and len(sequence.tokens) >= self._ends[sequence]:
                    with self._watch:
                        self.scheduler.finish(sequence, "length")
                    del self._ends[sequence]
                    self._arrive()

    def _arrive(self) -> None:
        self._n_requests += 1
        draw = self._random
        own = draw.randint(_LEAST_PROMPT, _MOST_PROMPT)
        prompt = tuple(draw.choices(range(1000), k=own))
        if self._n_requests % 2:
            prompt = (_SYSTEM + prompt)[: max(own, len(_SYSTEM) + 1)]
        sequence = Sequence(Request(self._n_requests, prompt))
        self._ends[sequence] = len(prompt) + self._n_answer()
        with self._watch:
            self.scheduler.add(sequence)

    def _n_answer(self) -> int:
        return self._random.randint(_LEAST_ANSWER, _MOST_ANSWER)


def of_scheduler(n_steps: int, progress: Progress) -> list[Overhead]:
    """Steady decoding, and with prompts arriving."""
    found = []
    for name, arrivals in (("all decode", False), ("prompts arrive", True)):
        server = NullServer(n_steps, arrivals=arrivals)
        taken = [server.step() for _ in range(n_steps)]
        found.append(Overhead(f"scheduler, {name}", N_RUNNING, quantiles(taken)))
        progress(len(found), 2)
    return found


def of_engine(subject: Subject, n_steps: int, progress: Progress) -> list[Overhead]:
    """Decode steps at max_batch: all of a step that is not the model's call.

    Greedy tokens are chosen by the model; sampled ones by the default chain, from its logits.
    """
    n = subject.max_batch
    context = min(subject.context, _PROMPT + n + _WARM_STEPS + n_steps + 1)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 0.8, "seed": 1},
    }
    found = []
    with subject.open(ctx=context, n_sequences=n, warm_rows=_PROMPT) as engine:
        for name, options in kinds.items():
            records = _decode_steps(engine, subject, n_steps, options)
            found.append(_overhead(f"engine, {name}", records[0].n_rows, records))
            progress(len(found), len(kinds))
    return found


def _decode_steps(
    engine: Engine, subject: Subject, n_steps: int, options: dict[str, Any]
) -> list[StepRecord]:
    """Records of `n_steps` steps in which as many requests decode as can, and nothing else runs.

    Fewer if the context is so small that they hardly ever all do; RequestError if they never do.
    """
    n = engine.scheduler.max_running
    steps = _DecodeSteps(n)
    engine.scheduler.on_step = steps
    running: dict[int, Request] = {}
    n_sent = 0
    for _ in range(_PATIENCE * (_WARM_STEPS + n_steps)):
        if len(steps.records) == _WARM_STEPS + n_steps:
            break
        while len(running) < n:
            ids = random_ids(subject.n_vocab, max(1, min(_PROMPT, engine.max_tokens // 4)), n_sent)
            request = engine.add_request(ids, **options)
            running[request.id] = request
            n_sent += 1
        for event in engine.step():
            if event.result is not None:
                del running[event.request.id]
    for request in running.values():
        engine.cancel(request)
    engine.step()
    if len(steps.records) <= _WARM_STEPS:
        raise RequestError(
            f"{n} requests of up to {engine.max_tokens} tokens never all decode at once",
            "compile the model with a larger context (--ctx)",
        )
    return steps.records[_WARM_STEPS:]


def _overhead(what: str, n_running: int, records: list[StepRecord]) -> Overhead:
    beside = [each.total_ns - each.model_ns for each in records]
    parts = [ns / each.total_ns for ns, each in zip(beside, records, strict=True)]
    us = quantiles(ns / 1000 for ns in beside)
    return Overhead(what, n_running, us, quantiles(parts).p50)


class _DecodeSteps:
    """Keeps the records of steps in which `n` sequences decode and nothing else runs."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.records: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        if record.decode_tokens == record.n_rows == self._n:
            self.records.append(record)


class _Stopwatch:
    """Sums the processor time of its thread inside its `with` blocks, in ns."""

    def __init__(self) -> None:
        self.ns = 0
        self._start = 0

    def __enter__(self) -> None:
        self._start = time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self.ns += time.thread_time_ns() - self._start
