"""The engine: prompts in, answers out.

`generate` and `stream` drive it for a caller who wants only answers; a server calls `add_request`,
`step` and `cancel` itself.

Everything happens on the calling thread. TVM keeps its pool of worker threads per calling thread,
so an engine must always be driven from the same one: driven from two, two pools share the cores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from xpuc.artifact import CHAT_TEMPLATE, TOKENIZER, Tail
from xpuc.errors import FieldError, RequestError
from xpuc.runtime.candidates import Floats
from xpuc.runtime.chunks import BUDGET_MS
from xpuc.runtime.cost_model import Work
from xpuc.runtime.generation import Chunk, Generation, Result
from xpuc.runtime.phases import JsonLines
from xpuc.runtime.policies import PolicyName, policy_of
from xpuc.runtime.prefix_store import STORE_BYTES, PrefixStore, identity_of, open_store
from xpuc.runtime.prompts import Message, Prompt, check_ids, is_prompt
from xpuc.runtime.sampling_params import SamplingParams, from_options
from xpuc.runtime.scheduler import QUEUE_BOUND, Span
from xpuc.runtime.score import Score, borrowed, score, teacher_forced
from xpuc.runtime.sequence import Request
from xpuc.runtime.speculation import Speculation
from xpuc.runtime.step_engine import Event, StepEngine

__all__ = ["Chunk", "Engine", "Event", "Request", "Result", "SamplingParams", "Score", "load"]


class Engine(StepEngine):
    """A StepEngine that answers callers who want no events: each drives it until it has its own."""

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **options: Any,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Many[str] | Many[Many[int]] | Many[Many[Message]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **options: Any,
    ) -> list[Result]: ...
    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **options: Any,
    ) -> Result | list[Result]:
        """The answer to a prompt, or to each of a list of prompts, which run together; the
        arguments are those of `add_request`.

        Nothing starts if one of them is refused (RequestError). A request that fails later has
        finish_reason "error" and says why in `error`. With n > 1 a prompt is computed once, and
        its further answers are `others` of its Result.
        """
        is_one = is_prompt(prompt)
        params = from_options(params, options)
        mine = [
            self._prepare(each, params, priority=priority, salt=salt)
            for each in ([prompt] if is_one else prompt)
        ]
        try:
            for generation in mine:
                self._own(generation)
            results = [self._result_of(each) for each in mine]
        finally:
            for generation in mine:
                self._disown(generation)
        return results[0] if is_one else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **options: Any,
    ) -> Iterator[Chunk]:
        """The answer as it comes: one chunk a token. Closing the iterator cancels the request."""
        params = from_options(params, options)
        if params.n > 1:
            raise RequestError(
                f"a stream is of one answer, n is {params.n}",
                "use `generate`, or `add_request`, whose events say which answer they are of",
            )
        return self._stream(self._prepare(prompt, params, priority=priority, salt=salt))

    def score(self, ids: Many[int], top_k: int = 0, *, chunk: int | None = None) -> Score:
        """How likely each of `ids` is after those before it, with the `top_k` likeliest there.

        Teacher-forced, `chunk` rows a call; RequestError if they exceed the context.
        """
        return score(self.teacher_forced(ids, chunk=chunk), ids, top_k)

    def teacher_forced(
        self, ids: Many[int], *, chunk: int | None = None
    ) -> Iterator[tuple[int, Floats]]:
        """(position, logits (n_vocab,) of what follows it) for each of `ids`; see `score`.

        RequestError where other steps are made before it is read to its end.
        """
        check_ids(ids, self.model.n_vocab, "the text")
        if not len(ids):
            raise RequestError("the text is empty", "give at least one token")
        if len(ids) > self.max_tokens:
            raise RequestError(
                f"the text has {len(ids)} tokens; the context holds {self.max_tokens}",
                "cut it, or load or compile with a larger context (--ctx)",
            )
        return self._teacher_forced(ids, chunk)

    def warm_up(self, n_rows: int = 1, *, tail: Tail = "greedy") -> None:
        """A throwaway decode step, a chunk of `n_rows` (at most the largest) and a decode step, so
        that the first request does not pay for what a first call costs.

        The times of the last two are the first that the scheduler knows of this machine.
        """
        n = max(1, min(n_rows, self.model.max_chunk, self.max_tokens))
        cost = self.scheduler.chunks.cost
        with borrowed(self.kv, [0]) as sequence:
            self._time(Span(sequence, 0, 1), tail)
        with borrowed(self.kv, [0] * n) as sequence:
            if n > 1:
                cost.observe(Work().with_chunk(n, 0), self._time(Span(sequence, 0, n), tail))
            last = Span(sequence, n - 1, 1)
            if self.model.is_replayed:
                self._time(last, tail)  # makes the graph
            cost.observe(Work(1, 0, n), self._time(last, tail))

    def _time(self, span: Span, tail: Tail) -> int:
        """ns of a step of one span."""
        start = time.perf_counter_ns()
        self._batch.fill([span])
        self.model.run(self._batch, tail=tail)
        return time.perf_counter_ns() - start

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
                if not (self._advance() or mailbox):
                    raise RequestError(
                        "no request can go on: all K/V is lent to a text that is being scored",
                        "read what teacher_forced gives to its end, or close it, before",
                    )
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
        self._n_read += 1
        made = self._steps_made
        with borrowed(self.kv, ids) as sequence:
            for row in teacher_forced(self.model, self._batch, self.kv, sequence, chunk):
                if self._steps_made != made:
                    raise RequestError(
                        "the model has made other steps since this text was begun",
                        "read what teacher_forced gives to its end before anything else is asked",
                    )
                yield row

    @property
    def _steps_made(self) -> tuple[int, int]:
        """What changes when a step may have overwritten the results of one before it."""
        return self.scheduler.counters.n_steps, self._n_read


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    ctx: int | None = None,
    n_sequences: int | None = None,
    warm_rows: int = 0,
    store: str | Path | None = None,
    store_bytes: int = STORE_BYTES,
    policy: PolicyName = "fcfs",
    chunk_budget_ms: float = BUDGET_MS,
    queue_bound: int = QUEUE_BOUND,
    speculation: Speculation | None = None,
    step_log: str | Path | None = None,
    pipeline: bool = True,
    graphs: bool = True,
    find_bad_layer: bool = False,
) -> Engine:
    """An engine on the artifact at `path`, ready to serve.

    threads          of the kernels; default: one a core
    ctx              most tokens a sequence can reach; default: what the artifact was compiled for
    n_sequences      how many of that length the K/V pool holds; default: the artifact's max_batch
    warm_rows        size of a throwaway prompt, so that the first request is as fast as the next
    store            folder for K/V that leaves memory, found again after a restart; at most
                     `store_bytes` of it. What is in memory then goes there in `Engine.close`
    policy           fcfs | priority | lpm | vllm: in which order requests are served
    chunk_budget_ms  how long prompts may keep those waiting that decode; math.inf: no bound
    queue_bound      most requests that wait; the next one is refused
    speculation      tokens guessed to come next are computed along, see speculation.Speculation;
                     default: none. The answers are the same
    pipeline         on a GPU a decode step is queued before the one before it is read
    graphs           on a GPU the launches of a decode step are queued as a CUDA graph
    find_bad_layer   a request whose logits are no numbers says in which layer the first of them is
    step_log         file that a line of JSON is added to for every step, see phases.StepRecord

    ArtifactError if it does not fit this machine, RequestError for values that cannot be used, of
    ctx too if the artifact has less, FileError if the store or the log cannot be opened.
    """
    from xpuc.runtime.bad_layer import first_bad_layer
    from xpuc.runtime.model import load_model  # tvm_ffi: only where a model is run
    from xpuc.runtime.tokenizer import Tokenizer

    policy_of(policy)  # refused before the work of loading
    _check_counts(1, threads=threads, ctx=ctx, n_sequences=n_sequences, queue_bound=queue_bound)
    _check_counts(0, warm_rows=warm_rows)
    if not chunk_budget_ms > 0:
        raise FieldError(["chunk_budget_ms"], f" is {chunk_budget_ms}", "give a number above 0")
    directory = Path(path)
    model = load_model(
        directory,
        threads=threads,
        ctx=ctx,
        n_sequences=n_sequences,
        pipeline=pipeline,
        graphs=graphs,
    )
    tokenizer = Tokenizer.from_files(directory / TOKENIZER, model.manifest.tokenizer)
    template = directory / CHAT_TEMPLATE
    identity = identity_of(model.manifest)
    kept: PrefixStore | None = None
    steps: JsonLines | None = None
    with ExitStack() as on_failure:
        if store is not None:
            kept = open_store(store, model.kv, identity, store_bytes)
            on_failure.callback(kept.close)
        if step_log is not None:
            steps = JsonLines.open(Path(step_log))
            on_failure.callback(steps.close)
        engine = Engine(
            model,
            tokenizer,
            chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
            queue_bound=queue_bound,
            policy=policy,
            chunk_budget_ms=chunk_budget_ms,
            speculation=speculation,
            store=kept,
            identity=identity,
            step_log=steps,
        )
        if find_bad_layer:
            engine.on_bad_logits = partial(first_bad_layer, model)
        if warm_rows:
            engine.warm_up(warm_rows)
        on_failure.pop_all()
    return engine


def _check_counts(least: int, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < least):
            raise FieldError([name], f" is {value!r}", f"give a whole number from {least} up")
