"""Who runs next: continuous batching, first come first served. Plain Python, no tensors.

There is no prefill and no decode phase: every running sequence is behind by some tokens, and a
step brings each of them forward, one token for those that decode, a chunk for those that do not.

    add -> waiting -> running -> finished
                       |   ^
                preempt v   | resume (recomputed through the same chunks)
                     preempted
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from xpuc.errors import RequestError
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.sequence import FinishReason, Sequence, State

QUEUE_BOUND = 512
# Ollama's words, both blanks included: clients look for them.
_QUEUE_FULL = "server busy, please try again.  maximum pending requests exceeded"


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of a sequence from position `start`: its part of one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the next token follows from this span, so that its result is wanted."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """Decides each step; the engine carries it out and calls `advance` and `finish`.

    max_batch    most sequences in a step
    max_chunk    most rows in a step
    max_context  most tokens a sequence may reach
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        *,
        max_batch: int,
        max_chunk: int,
        max_context: int,
        queue_bound: int = QUEUE_BOUND,
    ) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        # With as many rows as sequences, one that still reads its prompt always gets a row.
        self.max_running = min(max_batch, max_chunk)
        self.max_chunk = max_chunk
        self.max_tokens = min(max_context, pool.n_blocks * block_tokens)
        self.queue_bound = queue_bound
        self.waiting: deque[Sequence] = deque()
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.preempted or self.waiting)

    @property
    def n_queue_free(self) -> int:
        return self.queue_bound - len(self.waiting)

    def check(self, n_prompt: int) -> None:
        """Refuse a prompt that could never run (RequestError), before anything is spent on it."""
        if n_prompt == 0:
            raise RequestError("the prompt is empty", "give at least one token")
        if n_prompt >= self.max_tokens:
            raise RequestError(
                f"the prompt has {n_prompt} tokens; the context holds {self.max_tokens}, "
                "the answer included",
                "shorten the prompt, or load or compile with a larger context (--ctx)",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or refuse it with RequestError."""
        self.check(sequence.n_prompt)
        if self.n_queue_free <= 0:
            raise RequestError(
                _QUEUE_FULL, f"{self.queue_bound} requests are waiting already; try again later"
            )
        sequence.state = State.WAITING
        self.waiting.append(sequence)

    def plan(self) -> list[Span]:
        """The next step: decoding rows first, then prompt chunks, oldest first in each."""
        if not self._grow():
            self._admit()
        return self._spans()

    def advance(self, span: Span) -> None:
        """The step was carried out: the span's K/V is in the pool."""
        assert span.start == span.sequence.n_computed, "a span was carried out twice"
        span.sequence.n_computed += span.count

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out, whatever its state, and free its blocks; harmless when repeated."""
        if sequence.state is State.FINISHED:
            return
        for queue in (self.waiting, self.preempted, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._release(sequence)
        sequence.state = State.FINISHED
        sequence.finish_reason = reason

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)

    def _grow(self) -> bool:
        """Give every running sequence the block of its next token; True if someone had to yield.

        Oldest first, and the youngest yields, so older work never waits for newer.
        """
        has_preempted = False
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:  # it yielded to an older one just now
                continue
            missing = self._blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            while missing > self.pool.n_free and sequence.state is State.RUNNING:
                self._preempt(self.running[-1])
                has_preempted = True
            if missing > 0 and sequence.state is State.RUNNING:
                sequence.blocks.extend(self.pool.allocate(missing))
        return has_preempted

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = State.PREEMPTED
        self.preempted.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.epoch += 1
        sequence.n_computed = 0

    def _admit(self) -> None:
        """Preempted sequences first, each queue in its order; the first that does not fit ends it.

        A sequence gets all its blocks at once, so that two admitted together never count on the
        same ones. The headroom of one block is for its first tokens: without it, it would have to
        yield at once. Only a sequence as long as the whole pool does without.
        """
        for queue in (self.preempted, self.waiting):
            while queue:
                n_blocks = self._blocks_for(len(queue[0].tokens))
                wanted = min(n_blocks + 1, self.pool.n_blocks)
                if wanted > self.pool.n_free or len(self.running) >= self.max_running:
                    return
                sequence = queue.popleft()
                sequence.blocks = self.pool.allocate(n_blocks)
                sequence.state = State.RUNNING
                insort(self.running, sequence, key=lambda each: each.request.id)

    def _spans(self) -> list[Span]:
        spans = [Span(each, each.n_computed, 1) for each in self.running if each.n_pending == 1]
        n_rows = len(spans)
        for each in self.running:
            count = min(each.n_pending, self.max_chunk - n_rows)
            if each.n_pending > 1 and count > 0:
                spans.append(Span(each, each.n_computed, count))
                n_rows += count
        return spans
