"""Requests in, events out: what every way of driving an engine builds on.

A step is the whole loop: ask the scheduler who runs, copy the K/V it wants copied, describe the
step as a batch, run the model, choose each sequence's next token, deliver. Where steps are queued
on a device, the next one is there before the result of this one is waited for, if nothing but its
tokens hangs on that (see ahead.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch, StepModel
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.chunks import BUDGET_MS, ChunkPolicy
from xpuc.runtime.generation import Chunk, Codec, Generation, Result
from xpuc.runtime.intake import Intake
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.modes import Modes
from xpuc.runtime.phases import JsonLines
from xpuc.runtime.policies import PolicyName
from xpuc.runtime.prefix_store import PrefixStore
from xpuc.runtime.prompts import Prompt, PromptReader
from xpuc.runtime.sampler import SamplingError
from xpuc.runtime.sampling_params import SamplingParams, from_options
from xpuc.runtime.scheduler import QUEUE_BOUND, Plan, Scheduler, Span
from xpuc.runtime.sequence import Request, Sequence
from xpuc.runtime.speculation import Drafter, Speculation
from xpuc.runtime.step import Step, tail_of

log = logging.getLogger(__name__)


_UNKNOWN = -1  # stands for a token that is still to be chosen


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
        self._ahead: Step | None = None  # queued, and its turn is next
        self._n_read = 0  # texts that were begun to be read by `Engine.teacher_forced`
        # Asked when a request's logits are no numbers; its answer goes into the request's error. It
        # may run the model.
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
    def modes(self) -> Modes:
        """How the model is decoded."""
        return self.model.modes

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

    def _advance(self) -> bool:
        """One step, if there is one to make."""
        self._end_cancelled()
        while self._backlog and self.scheduler.n_queue_free > 0:
            self.scheduler.add(self._backlog.popleft().sequence)
        step, self._ahead = self._ahead, None
        if step is not None:
            self.scheduler.begin(step.plan)
        else:
            plan = self.scheduler.plan()
            if not plan.spans:
                return False
            step = self._step(plan)
            for each in step.generations:
                each.begin_step()
        self._carry_out(step)
        self._drop_ahead()
        return True

    def _end_cancelled(self) -> None:
        while self._cancelled:
            generation = self._cancelled.popleft()
            if generation.id in self._live:
                self._deliver(generation, generation.end())
        self._drop_ahead()

    def _step(self, plan: Plan) -> Step:
        """Who a plan is for, and what it has to give them."""
        generations = [self._live[span.sequence.request.id] for span in plan.spans]
        pairs = zip(generations, plan.spans, strict=True)
        wanted = [(each, span) for each, span in pairs if span.is_last]
        return Step(
            plan, generations, wanted, tail_of((each for each, _ in wanted), self.model.tails)
        )

    def _carry_out(self, step: Step) -> None:
        """Run a step, or wait for one that is queued, and deliver what it gives."""
        plan = step.plan
        start = time.perf_counter_ns()
        try:
            rows = self._rows_of(step)
        except Exception as error:
            log.debug("a step of %d requests failed", len(plan.spans), exc_info=True)
            what = str(error) or repr(error)
            for each in step.generations:
                self._fail(each, f"the step failed: {what}")
            self.scheduler.end_step(plan, failed=True)
            return
        plan.record.model_ns = time.perf_counter_ns() - start
        if self.on_bad_logits is not None:
            rows = [copy(row) for row in rows]
        results = iter(rows)  # no result wanted: one row, unused
        for each, span in step.wanted:
            row, *drafted = islice(results, 1 + len(span.drafts))
            if each.id not in self._live:
                plan.record.n_dropped += 1
                continue
            for completion in self._fork(each):
                self._choose(completion, row, step.tail)
            self._verify(each, plan, span, drafted, step.tail)
        self.scheduler.end_step(plan)

    def _rows_of(self, step: Step) -> Any:
        """The result of a step; where it may be, the next one is queued before it is waited for."""
        if step.ticket is None:
            for each in step.plan.copies:
                self.model.copy_block(*each)
            if not self._may_be_followed(step):
                rows = step.issue(self._batch, self.model.run)
                self.scheduler.complete(step.plan)
                return rows
            step.ticket = step.issue(self._batch, self.model.submit)
        # What is asked of the model from now on it does after this step.
        self.scheduler.complete(step.plan)
        if self._may_be_followed(step):
            self._ahead = self._queued_after(step)
        start = time.perf_counter_ns()
        rows = self.model.collect(step.ticket)
        step.plan.record.wait_ns = time.perf_counter_ns() - start
        return rows

    def _may_be_followed(self, step: Step) -> bool:
        """Whether what comes after a step may be known but for the tokens, which it gives."""
        return (
            self.modes.pipelined.is_on
            and step.tail != "logits"
            and all(each.goes_on_plainly for each in step.generations)
        )

    def _queued_after(self, step: Step) -> Step | None:
        sequences = [span.sequence for span in step.plan.spans]
        for sequence in sequences:
            sequence.tokens.append(_UNKNOWN)
        try:
            plan = self.scheduler.plan_ahead(step.plan)
            if plan is None:
                return None
            ahead = self._step(plan)
            ahead.ticket = ahead.issue(
                self._batch, self.model.submit, n_unknown=1, follows=step.ticket
            )
            return ahead
        except Exception:  # it is made in its turn, and says what is wrong then
            log.debug("a step could not be queued ahead", exc_info=True)
            return None
        finally:
            for sequence in sequences:
                sequence.tokens.pop()

    def _drop_ahead(self) -> None:
        """A step that is queued for nobody any more is over: its result is never waited for."""
        step = self._ahead
        if step is not None and not any(each.id in self._live for each in step.generations):
            self._ahead = None
            self.scheduler.begin(step.plan)
            step.plan.record.n_dropped = len(step.generations)
            self.scheduler.end_step(step.plan)

    def _fork(self, generation: Generation) -> list[Generation]:
        """The completions that its result is for: the first one is for all of its request."""
        if generation.sequence.n_generated:
            return [generation]
        for fork in generation.forks:
            self.scheduler.fork(generation.sequence, fork.sequence)
        return generation.completions

    def _choose(self, generation: Generation, row: Any, tail: Tail) -> None:
        """Its next token; nothing if another completion's failure has ended it just now."""
        if generation.id not in self._live:
            return
        try:
            id_, logprob = generation.choose(row, tail)
        except SamplingError as error:
            self._fail(generation, error.message, error.hint)
            return
        self._deliver(generation, generation.accept(id_, logprob))
        if generation.error is not None:
            self._fail(generation, generation.error, generation.hint)

    def _verify(
        self, generation: Generation, plan: Plan, span: Span, rows: list[Any], tail: Tail
    ) -> None:
        """Go on with the results of the drafts, as long as these are what was chosen."""
        tokens = generation.sequence.tokens
        for draft, row in zip(span.drafts, rows, strict=True):
            if generation.id not in self._live or tokens[-1] != draft:
                return
            self.scheduler.accept(plan, span)
            self._choose(generation, row, tail)

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
