"""Requests in, events out: what every way of driving an engine builds on.

A step is the whole loop: ask the scheduler who runs, copy the K/V it wants copied, describe the
step as a batch, run the model, choose each sequence's next token, deliver.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

from xpuc.runtime.batch import Batch, StepModel
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.chunks import BUDGET_MS, ChunkPolicy
from xpuc.runtime.generation import Chunk, Codec, Generation, Result
from xpuc.runtime.intake import Intake
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.phases import JsonLines
from xpuc.runtime.policies import PolicyName
from xpuc.runtime.prefix_store import PrefixStore
from xpuc.runtime.prompts import Prompt, PromptReader
from xpuc.runtime.sampler import SamplingError
from xpuc.runtime.sampling_params import SamplingParams, from_options
from xpuc.runtime.scheduler import QUEUE_BOUND, Plan, Scheduler, Span
from xpuc.runtime.sequence import Request, Sequence
from xpuc.runtime.speculation import Drafter, Speculation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did for a request's `index`-th completion, one for each token of the step;
    `result` comes with the last chunk."""

    request: Request
    chunk: Chunk
    result: Result | None
    index: int = 0


class StepEngine:
    """Serves many requests on one model. A context manager: `close` is due at its end.

    tokenizer        without one it takes and gives ids only
    queue_bound      most requests that wait
    policy           in which order they are served, see policies.py
    chunk_budget_ms  how long prompts may keep those waiting that decode, see chunks.py
    speculation      how drafts are made, see speculation.py; default: there are none
    store            keeps K/V that leaves memory; closed with the engine
    identity         of the model's K/V, as the store was opened with
    step_log         told of every step; closed with the engine
    """

    def __init__(
        self,
        model: StepModel,
        tokenizer: Codec | None = None,
        *,
        chat_template: str | None = None,
        queue_bound: int = QUEUE_BOUND,
        policy: PolicyName = "fcfs",
        chunk_budget_ms: float = BUDGET_MS,
        speculation: Speculation | None = None,
        store: PrefixStore | None = None,
        identity: bytes = b"",
        step_log: JsonLines | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = PromptReader(tokenizer, n_vocab=model.n_vocab, chat_template=chat_template)
        self.store = store
        self.step_log = step_log
        pools = [
            BlockPool(
                n_blocks,
                model.block_tokens,
                seed=identity,
                on_evict=None if store is None else partial(store.save, group),
            )
            for group, n_blocks in enumerate(model.n_blocks)
        ]
        self.kv = KvBlocks(pools, model.windows, max_chunk=model.max_chunk, store=store)
        self.modes = model.modes
        for mode in self.modes:
            log.info("%s", mode)
        if step_log is not None:
            step_log.begin(self.modes)
        is_batched = self.modes.batched.is_on
        drafter = None
        if speculation is not None and speculation.draft_max:
            max_rows = max(model.buckets, default=0) if is_batched else 1
            drafter = Drafter(speculation, max_rows=max_rows)
        self.scheduler = Scheduler(
            self.kv,
            max_batch=model.max_batch,
            max_chunk=model.max_chunk,
            max_context=model.max_context,
            queue_bound=queue_bound,
            policy=policy,
            chunks=ChunkPolicy(model.max_chunk, budget_ms=chunk_budget_ms),
            drafter=drafter,
            singly=not is_batched,
            on_step=step_log,
        )
        self._batch = Batch(model)
        self._intake = Intake(self.prompts, tokenizer, self.scheduler, n_vocab=model.n_vocab)
        # Completions by the ids of their sequences.
        self._live: dict[int, Generation] = {}
        self._cancelled: deque[Generation] = deque()
        # Requests of `generate` and `stream`: those the queue has no room for yet, and the events
        # that wait for their caller while another one drives the engine.
        self._backlog: deque[Generation] = deque()
        self._mailboxes: dict[int, deque[Event]] = {}
        self._undelivered: list[Event] = []
        # Asked when a request's logits are no numbers; its answer goes into the request's error.
        self.on_bad_logits: Callable[[Sequence], str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended, keep in the store what is cached, close it and the step log.

        Harmless when repeated.
        """
        for generation in list(self._live.values()):
            self.cancel(generation.request)
        self._end_cancelled()
        if self.store is not None:
            for group, each in enumerate(self.kv.groups):
                self.store.save_all(group, each.pool.cached())
            self.store.close()
        if self.step_log is not None:
            self.step_log.close()

    @property
    def max_tokens(self) -> int:
        """The most tokens a request can reach, prompt included."""
        return self.scheduler.max_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._undelivered)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **options: Any,
    ) -> Request:
        """Queue a request, or refuse it (RequestError: too long, queue full, bad options).

        `options` are fields of SamplingParams and override those of `params`; see Request for the
        others. The events of the request come out of `step`; of its n completions each has a last
        one, with its result.
        """
        params = from_options(params, options)
        generation = self._prepare(prompt, params, priority=priority, salt=salt)
        self.scheduler.add(generation.sequence)
        self._enlist(generation)
        return generation.request

    def cancel(self, request: Request) -> None:
        """End a request; its last events come with the next step. Harmless when it has ended."""
        for generation in self._completions(request):
            if not generation.is_cancelled:
                generation.is_cancelled = True
                self._cancelled.append(generation)

    def step(self) -> list[Event]:
        """One step of everything that runs, and its events for requests of `add_request`.

        A step that fails (an exception in the model) ends its requests with "error", no others.
        """
        self._advance()
        events, self._undelivered = self._undelivered, []
        return events

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, salt: bytes = b""
    ) -> Generation:
        return self._intake.prepare(
            prompt, params, priority=priority, salt=salt, on_bad_logits=self.on_bad_logits
        )

    def _enlist(self, generation: Generation) -> None:
        self._live.update((each.id, each) for each in generation.completions)

    def _completions(self, request: Request) -> list[Generation]:
        """Those that have not ended."""
        ids = range(request.id, request.id + request.params.n)
        return [self._live[id_] for id_ in ids if id_ in self._live]

    def _advance(self) -> None:
        self._end_cancelled()
        while self._backlog and self.scheduler.n_queue_free > 0:
            self.scheduler.add(self._backlog.popleft().sequence)
        plan = self.scheduler.plan()
        if plan.spans:
            self._run(plan)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            generation = self._cancelled.popleft()
            if generation.id in self._live:
                self._deliver(generation, generation.end())

    def _run(self, plan: Plan) -> None:
        spans = plan.spans
        generations = [self._live[span.sequence.request.id] for span in spans]
        wanted = [pair for pair in zip(generations, spans, strict=True) if pair[1].is_last]
        greedy = not any(each.needs_logits for each, _ in wanted)
        for each in generations:
            each.begin_step()
        start = time.perf_counter_ns()
        try:
            for copy in plan.copies:
                self.model.copy_block(*copy)
            self._batch.fill(spans)
            rows = self.model.run(self._batch, tail="greedy" if greedy else "logits")
        except Exception as error:
            log.debug("a step of %d requests failed", len(spans), exc_info=True)
            for each in generations:
                self._fail(each, f"the step failed: {error}")
            self.scheduler.end_step(plan, failed=True)
            return
        self.scheduler.complete(plan, time.perf_counter_ns() - start)
        results = iter(rows)  # no result wanted: one row, unused
        for each, span in wanted:
            row = next(results)
            for completion in self._fork(each):
                self._choose(completion, row, greedy)
            if span.drafts:
                self._verify(each, plan, span, list(islice(results, len(span.drafts))), greedy)
        self.scheduler.end_step(plan)

    def _fork(self, generation: Generation) -> list[Generation]:
        """The completions that its result is for: the first one is for all of its request."""
        if generation.sequence.n_generated:
            return [generation]
        for fork in generation.forks:
            self.scheduler.fork(generation.sequence, fork.sequence)
        return generation.completions

    def _choose(self, generation: Generation, row: Any, greedy: bool) -> None:
        """Its next token; nothing if another completion's failure has ended it just now."""
        if generation.id not in self._live:
            return
        try:
            id_, logprob = generation.choose(row, greedy=greedy)
        except SamplingError as error:
            self._fail(generation, error.message, error.hint)
            return
        self._deliver(generation, generation.accept(id_, logprob))
        if generation.error is not None:
            self._fail(generation, generation.error, generation.hint)

    def _verify(
        self, generation: Generation, plan: Plan, span: Span, rows: list[Any], greedy: bool
    ) -> None:
        """Go on with the results of the drafts, as long as these are what was chosen."""
        tokens = generation.sequence.tokens
        for draft, row in zip(span.drafts, rows, strict=True):
            if generation.id not in self._live or tokens[-1] != draft:
                return
            self.scheduler.accept(plan, span)
            self._choose(generation, row, greedy)

    def _fail(self, generation: Generation, error: str, hint: str | None = None) -> None:
        """All of its request that has not ended ends with `error`."""
        for each in self._completions(generation.request):
            self._deliver(each, each.end(error, hint))

    def _deliver(self, generation: Generation, chunk: Chunk) -> None:
        result = None
        if chunk.finish_reason is not None:
            if generation in self._backlog:
                self._backlog.remove(generation)
            self.scheduler.finish(generation.sequence, chunk.finish_reason)
            del self._live[generation.id]
            result = generation.result()
        event = Event(generation.request, chunk, result, generation.index)
        mailbox = self._mailboxes.get(generation.id)
        if mailbox is not None:
            mailbox.append(event)
        else:
            self._undelivered.append(event)
