"""The engine: requests in, tokens out, one step at a time.

`Engine.step` is the whole loop: ask the scheduler who runs, describe the step as a batch, run the
model, choose each sequence's next token, deliver. `generate` and `stream` drive it for a caller
who wants only answers; a server calls `add_request`, `step` and `cancel` itself.

Everything happens on the calling thread. TVM keeps its pool of worker threads per calling thread,
so an engine must always be driven from the same one: driven from two, two pools share the cores.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from xpuc.artifact import CHAT_TEMPLATE, TOKENIZER
from xpuc.errors import RequestError
from xpuc.runtime.batch import Batch, StepModel
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.candidates import Floats
from xpuc.runtime.generation import Chunk, Codec, Generation, Result
from xpuc.runtime.intake import Intake
from xpuc.runtime.prompts import Message, Prompt, PromptReader, check_ids, is_prompt
from xpuc.runtime.sampler import SamplingError
from xpuc.runtime.sampling_params import SamplingParams, from_options
from xpuc.runtime.scheduler import QUEUE_BOUND, Plan, Scheduler, Span
from xpuc.runtime.score import Score, borrowed, score, teacher_forced
from xpuc.runtime.sequence import Request, Sequence

__all__ = ["Chunk", "Engine", "Event", "Request", "Result", "SamplingParams", "Score", "load"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did for a request's `index`-th completion; `result` comes with its last chunk."""

    request: Request
    chunk: Chunk
    result: Result | None
    index: int = 0


class Engine:
    """Serves many requests on one model.

    Without a tokenizer it takes and gives ids only.
    """

    def __init__(
        self,
        model: StepModel,
        tokenizer: Codec | None = None,
        *,
        chat_template: str | None = None,
        queue_bound: int = QUEUE_BOUND,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = PromptReader(tokenizer, n_vocab=model.n_vocab, chat_template=chat_template)
        self.pool = BlockPool(model.n_blocks, model.block_tokens)
        self.scheduler = Scheduler(
            self.pool,
            max_batch=model.max_batch,
            max_chunk=model.max_chunk,
            max_context=model.max_context,
            queue_bound=queue_bound,
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

    @property
    def max_tokens(self) -> int:
        """The most tokens a request can reach, prompt included."""
        return self.scheduler.max_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._undelivered)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Request:
        """Queue a request, or refuse it (RequestError: too long, queue full, bad options).

        `options` are fields of SamplingParams and override those of `params`. The events of the
        request come out of `step`; of its n completions each has a last one, with its result.
        """
        generation = self._prepare(prompt, from_options(params, options))
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

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Many[str] | Many[Many[int]] | Many[Many[Message]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Result]: ...
    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> Result | list[Result]:
        """The answer to a prompt, or to each of a list of prompts, which run together.

        Nothing starts if one of them is refused (RequestError). A request that fails later has
        finish_reason "error" and says why in `error`. With n > 1 a prompt is computed once, and
        its further answers are `others` of its Result.
        """
        is_one = is_prompt(prompt)
        params = from_options(params, options)
        mine = [self._prepare(each, params) for each in ([prompt] if is_one else prompt)]
        try:
            for generation in mine:
                self._own(generation)
            results = [self._result_of(each) for each in mine]
        finally:
            for generation in mine:
                self._disown(generation)
        return results[0] if is_one else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """The answer as it comes: one chunk a token. Closing the iterator cancels the request."""
        params = from_options(params, options)
        if params.n > 1:
            raise RequestError(
                f"a stream is of one answer, n is {params.n}",
                "use `generate`, or `add_request`, whose events say which answer they are of",
            )
        return self._stream(self._prepare(prompt, params))

    def score(self, ids: Many[int], top_k: int = 0, *, chunk: int | None = None) -> Score:
        """How likely each of `ids` is after those before it, with the `top_k` likeliest there.

        Teacher-forced, `chunk` rows a call; RequestError if they exceed the context.
        """
        return score(self.teacher_forced(ids, chunk=chunk), ids, top_k)

    def teacher_forced(
        self, ids: Many[int], *, chunk: int | None = None
    ) -> Iterator[tuple[int, Floats]]:
        """(position, logits (n_vocab,) of what follows it) for each of `ids`; see `score`."""
        check_ids(ids, self.model.n_vocab, "the text")
        if not 0 < len(ids) <= self.max_tokens:
            raise RequestError(
                f"the text has {len(ids)} tokens; the context holds 1 to {self.max_tokens}",
                "cut it, or load or compile with a larger context (--ctx)",
            )
        return self._teacher_forced(ids, chunk)

    def warm_up(self, n_rows: int = 1, *, greedy: bool = True) -> None:
        """A throwaway chunk of `n_rows` (at most the largest) and a decode step, so that the first
        request does not pay for what a first call costs."""
        n = max(1, min(n_rows, self.model.max_chunk, self.max_tokens))
        with borrowed(self.pool, self.model.block_tokens, [0] * n) as sequence:
            for start, count in ((0, n), (n - 1, 1)):
                self._batch.fill([Span(sequence, start, count)])
                self.model.run(self._batch, greedy=greedy)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> Generation:
        return self._intake.prepare(prompt, params, self.on_bad_logits)

    def _enlist(self, generation: Generation) -> None:
        self._live.update((each.id, each) for each in generation.completions)

    def _completions(self, request: Request) -> list[Generation]:
        """Those that have not ended."""
        ids = range(request.id, request.id + request.params.n)
        return [self._live[id_] for id_ in ids if id_ in self._live]

    def _own(self, generation: Generation) -> None:
        self._mailboxes.update((each.id, deque()) for each in generation.completions)
        self._enlist(generation)
        self._backlog.append(generation)

    def _disown(self, generation: Generation) -> None:
        """Nobody waits for it any more: if it has not ended, end it and free its blocks."""
        self.cancel(generation.request)
        self._end_cancelled()
        for each in generation.completions:
            self._mailboxes.pop(each.id, None)

    def _events_of(self, generation: Generation) -> Iterator[Event]:
        mailbox = self._mailboxes[generation.id]
        while True:
            while not mailbox:
                self._advance()
            event = mailbox.popleft()
            yield event
            if event.result is not None:
                return

    def _result_of(self, generation: Generation) -> Result:
        results = []
        for each in generation.completions:
            *_, last = self._events_of(each)
            assert last.result is not None
            results.append(last.result)
        return replace(results[0], others=tuple(results[1:]))

    def _stream(self, generation: Generation) -> Iterator[Chunk]:
        self._own(generation)
        try:
            for event in self._events_of(generation):
                yield event.chunk
        finally:
            self._disown(generation)

    def _teacher_forced(self, ids: Many[int], chunk: int | None) -> Iterator[tuple[int, Floats]]:
        with borrowed(self.pool, self.model.block_tokens, ids) as sequence:
            yield from teacher_forced(self.model, self._batch, sequence, chunk)

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
        wanted = [each for each, span in zip(generations, spans, strict=True) if span.is_last]
        greedy = not any(each.needs_logits for each in wanted)
        for each in generations:
            each.begin_step()
        start = time.perf_counter_ns()
        try:
            for source, destination in plan.copies:
                self.model.copy_block(source, destination)
            self._batch.fill(spans)
            rows = self.model.run(self._batch, greedy=greedy)
        except Exception as error:
            log.debug("a step of %d requests failed", len(spans), exc_info=True)
            for each in generations:
                self._fail(each, f"the step failed: {error}")
            self.scheduler.end_step(plan, failed=True)
            return
        self.scheduler.complete(plan, time.perf_counter_ns() - start)
        for each, row in zip(wanted, rows, strict=False):  # no result wanted: one row, unused
            for completion in self._fork(each):
                self._choose(completion, row, greedy)
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
            self._fail(generation, str(error))
            return
        self._deliver(generation, generation.accept(id_, logprob))
        if generation.error is not None:
            self._fail(generation, generation.error)

    def _fail(self, generation: Generation, error: str) -> None:
        """All of its request that has not ended ends with `error`."""
        for each in self._completions(generation.request):
            self._deliver(each, each.end(error))

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


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    ctx: int | None = None,
    n_sequences: int | None = None,
    warm_rows: int = 0,
) -> Engine:
    """An engine on the artifact at `path`, ready to serve.

    threads      of the kernels; default: one a core
    ctx          most tokens a sequence can reach; default: what the artifact was compiled for
    n_sequences  how many of that length the K/V pool holds; default: the artifact's max_batch
    warm_rows    size of a throwaway prompt, so that the first request is as fast as the next

    ArtifactError if it does not fit this machine, RequestError if ctx is too large.
    """
    from xpuc.runtime.model import load_model  # tvm_ffi: only where a model is run
    from xpuc.runtime.tokenizer import Tokenizer

    directory = Path(path)
    model = load_model(directory, threads=threads, ctx=ctx, n_sequences=n_sequences)
    template = directory / CHAT_TEMPLATE
    engine = Engine(
        model,
        Tokenizer.from_files(directory / TOKENIZER, model.manifest.tokenizer),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )
    if warm_rows:
        engine.warm_up(warm_rows)
    return engine
