"""Who runs next: continuous batching. Plain Python, no tensors.

There is no prefill and no decode phase: every running sequence is behind by some tokens, and a
step brings each of them forward, one token for those that decode, a chunk for those that do not.

    add -> waiting -> running -> finished
                       |   ^
                preempt v   | resume (what the pools or the store still have, then the same chunks)
                     preempted

One step of an engine:

    plan = scheduler.plan()
    copy the K/V of plan.copies, in order; run the model over plan.spans
    scheduler.complete(plan)        # the K/V is in the pools, full blocks can be found
    append each result to its sequence; finish those that end, fork those that are asked twice
    scheduler.end_step(plan)        # the record, and what the step's time teaches

A sequence may be finished at any time, between `plan` and `complete` too: its rows are computed
for nobody. What is freed admits waiting sequences in the very next plan, which is the same step
for a caller that ends requests before it plans. A step that fails is never completed: finish its
sequences with "error" and end it with `failed`.

Sampling happens between `complete` and `end_step`. An engine that plans ahead of it (a pipelined
decode) appends a placeholder token to each sequence, calls `plan_ahead`, and takes them away: that
step is completed when they are known, as hashes are taken in `complete`. Draft tokens are in the
span only: a span's results are one for its last token and one for each draft, and where the token
appended is the next draft, `accept` says so before the next one is appended.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from xpuc.errors import RequestError
from xpuc.runtime import ahead, running_first
from xpuc.runtime.chunks import ChunkPolicy
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.phases import StepCounters, StepRecord
from xpuc.runtime.plan import KeptSpans, Plan, Span, decode_work
from xpuc.runtime.policies import PolicyName, policy_of
from xpuc.runtime.sequence import FinishReason, Sequence, State
from xpuc.runtime.speculation import Drafter
from xpuc.runtime.turns import take_turns

__all__ = ["QUEUE_BOUND", "Plan", "Scheduler", "Span"]

QUEUE_BOUND = 512
# Ollama's words, both blanks included: clients look for them.
_QUEUE_FULL = "server busy, please try again.  maximum pending requests exceeded"
_RANK = attrgetter("rank")


class Scheduler:
    """Decides each step; the engine carries it out.

    kv           what sequences have of the K/V
    max_batch    most sequences in a step
    max_chunk    most rows in a step
    max_context  most tokens a sequence may reach
    chunks       how many prompt tokens a step takes; default: ChunkPolicy's
    drafter      adds drafts to steps that only decode
    singly       one decoding sequence a step goes on: the model takes no batches of them
    on_step      told of every step that ends
    clock        ns
    """

    def __init__(
        self,
        kv: KvBlocks,
        *,
        max_batch: int,
        max_chunk: int,
        max_context: int,
        queue_bound: int = QUEUE_BOUND,
        policy: PolicyName = "fcfs",
        chunks: ChunkPolicy | None = None,
        drafter: Drafter | None = None,
        singly: bool = False,
        on_step: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.kv = kv
        # With as many rows as sequences, one that still reads its prompt always gets a row.
        self.max_running = min(max_batch, max_chunk)
        self.max_chunk = max_chunk
        self.max_tokens = min(max_context, kv.max_tokens)
        self.queue_bound = queue_bound
        self.policy = policy_of(policy)
        self.chunks = chunks or ChunkPolicy(max_chunk)
        self.drafter = drafter
        self.singly = singly
        self.on_step = on_step
        self.counters = StepCounters()
        self.waiting: list[Sequence] = []  # by rank
        self.preempted: deque[Sequence] = deque()  # in the order they resume
        self.running: list[Sequence] = []  # the last one yields
        self.kept = KeptSpans()
        self._clock = clock
        self._n_steps = 0
        self._record = StepRecord()  # of the step that is planned

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
        sequence.rank = self.policy.rank(sequence.request)
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_RANK)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child`, a new sequence of the same prompt, goes on from where `parent` stands.

        Both own the parent's blocks; whichever writes to the last one first gets a copy. Fork a
        prompt's completions after its last chunk, before a token is appended, so that each has a
        result of its own to start from; give them ids that are reserved with the parent's, as
        they are as old. Where no more may run, the child waits like a preempted sequence.
        """
        assert child.state is State.NEW, "only a new sequence can be a fork"
        assert child.request.prompt_ids == parent.request.prompt_ids, "a fork of another prompt"
        child.tokens[:] = parent.tokens
        child.links[:] = parent.links
        child.rank = self.policy.rank(child.request)
        if parent.state is not State.RUNNING or len(self.running) >= self.max_running:
            child.state = State.PREEMPTED
            self.preempted.append(child)
            return
        self.kv.fork(parent, child)
        self.enter(child)

    def plan(self) -> Plan:
        """The next step; without spans there is nothing to run."""
        self._n_steps += 1
        start = self._clock()
        plan = Plan(record=StepRecord(self._n_steps, start))
        record = self._record = plan.record
        if self.policy.is_running_first:
            running_first.schedule(self, plan)
            record.reserve_ns = self._clock() - start
        else:
            self._grow(plan)
            reserved = self._clock()
            record.reserve_ns = reserved - start
            if not record.n_preempted:
                self._admit()
            record.admission_ns = self._clock() - reserved
            self._share_out(plan)
        record.decode_tokens, record.prefill_tokens = plan.work.decode_rows, plan.work.chunk_tokens
        if self.drafter is not None:
            drafted = self._clock()
            self.drafter.draft(plan, self.kv, self.max_tokens)
            record.draft_ns = self._clock() - drafted
        self._count(plan)
        return plan

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step after `plan`, which is complete and not read: every sequence has a placeholder
        for its next token. None if that step is to be planned when the tokens are known."""
        if not ahead.follows(self, plan):
            return None
        self._n_steps += 1
        planned = Plan(record=StepRecord(self._n_steps, self._clock(), n_ahead=1))
        ahead.fill(self, planned)
        planned.record.decode_tokens = planned.work.decode_rows
        self._count(planned)
        return planned

    def begin(self, plan: Plan) -> None:
        """It is the turn of a step that was planned ahead: the one before it is over."""
        plan.record.start_ns = self._clock()

    def _count(self, plan: Plan) -> None:
        """What the record says of a plan."""
        record = plan.record
        record.n_rows = record.decode_tokens + record.n_drafted + record.prefill_tokens
        record.n_copies = len(plan.copies)
        record.n_running = len(self.running)
        record.n_queue = len(self.waiting) + len(self.preempted)
        record.n_free_blocks = self.kv.n_free

    def complete(self, plan: Plan) -> None:
        """The model was run, or what it has to do is queued before all that is asked of it from now
        on: the spans' K/V is in the pools, and their full blocks can be found."""
        advance, running = self.kv.advance, State.RUNNING
        for span in plan.spans:
            sequence, start = span.sequence, span.start
            if sequence.state is not running:  # finished since
                continue
            assert start == sequence.n_computed, "a span was carried out twice"
            n_computed = start + span.count
            if n_computed < sequence.n_due:
                sequence.n_computed = n_computed
            else:
                advance(sequence, n_computed)

    def accept(self, plan: Plan, span: Span) -> None:
        """The token just appended is the span's next draft, so that it is computed already."""
        sequence = span.sequence
        assert sequence.tokens[-1] == span.drafts[span.n_accepted], "another token was drafted"
        span.n_accepted += 1
        sequence.n_accepted += 1
        plan.record.n_accepted += 1
        self.kv.advance(sequence, sequence.n_computed + 1)

    def end_step(self, plan: Plan, *, failed: bool = False) -> None:
        """The step is over: its tokens are delivered, or it `failed` and taught nothing."""
        record = plan.record
        record.total_ns = self._clock() - record.start_ns
        record.failed = failed
        if self.drafter is not None:
            self.drafter.settle(plan, self.kv)
        if plan.spans and not (failed or record.n_ahead):
            # Of a step ahead nobody saw when it began. What was spent before the chunk was sized is
            # weighed there as it is.
            spent_ns = record.reserve_ns + record.admission_ns
            self.chunks.cost.observe(plan.work, record.total_ns - spent_ns)
        self.counters.add(record)
        if self.on_step is not None:
            self.on_step(record)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out, whatever its state, and free its blocks; harmless when repeated.

        Its prefix stays findable, unless it failed: then what it computed is not used again.
        """
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence)
        if reason == "error":
            self.kv.withdraw(sequence)
        self.kv.release(sequence)
        sequence.state = State.FINISHED
        sequence.finish_reason = reason

    def _grow(self, plan: Plan) -> None:
        """Give every running sequence the block of its next token.

        In order of rank, and the last one yields, so older work never waits for newer.
        """
        lacking = [s for s in self.running if len(s.tokens) > s.n_room or s.may_share]
        for sequence in lacking:
            if sequence.state is State.RUNNING:  # it may have yielded just now
                self.reserve(sequence, len(sequence.tokens), plan)

    def reserve(self, sequence: Sequence, n_tokens: int, plan: Plan) -> bool:
        """Blocks of its own for a running sequence's tokens from n_computed to n_tokens; False if
        it had to yield itself."""
        while not self.kv.grow(sequence, n_tokens, plan.copies):
            self._preempt(self.running[-1])
            if sequence.state is not State.RUNNING:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.kv.release(sequence)
        sequence.state = State.PREEMPTED
        if self.policy.is_running_first:
            self.preempted.appendleft(sequence)
        else:
            self.preempted.append(sequence)
        self._record.n_preempted += 1

    def _admit(self) -> None:
        """Preempted sequences first, in their order; the first that does not fit ends it."""
        while self.preempted:
            if not self._start(self.preempted[0]):
                return
            self.preempted.popleft()
            self._record.n_resumed += 1
        while self.waiting and len(self.running) < self.max_running:
            index = self.policy.pick(self.waiting, self.kv.n_cached)
            if not self._start(self.waiting[index]):
                return
            if index:
                self.waiting[0].n_overtaken += 1
            del self.waiting[index]
            self._record.n_admitted += 1

    def _start(self, sequence: Sequence) -> bool:
        """Let a sequence run if free blocks cover all of it that is not found, and one more."""
        if len(self.running) >= self.max_running:
            return False
        if not self.kv.start(sequence, len(sequence.tokens), headroom=1):
            return False
        self.enter(sequence)
        return True

    def enter(self, sequence: Sequence) -> None:
        """A sequence that has its blocks begins to run."""
        sequence.state = State.RUNNING
        if self.policy.is_running_first:
            self.running.append(sequence)
        else:
            insort(self.running, sequence, key=_RANK)

    def _share_out(self, plan: Plan) -> None:
        """A row for each that decodes, then chunks for the prompts, as many as are good."""
        spans, behind = plan.spans, []
        for sequence, span in zip(self.running, self.kept.next(self.running), strict=True):
            start = sequence.n_computed
            n_pending = len(sequence.tokens) - start
            if n_pending == 1:
                span.sequence = sequence
                span.start = start
                spans.append(span)
            elif n_pending > 1:
                behind.append((sequence, n_pending))
        if self.singly:
            take_turns(plan)
        plan.work = decode_work(plan.spans)
        if behind:
            self._share_out_chunks(plan, behind)

    def _share_out_chunks(self, plan: Plan, behind: list[tuple[Sequence, int]]) -> None:
        """To sequences and how many tokens they are behind by."""
        record, n_behind = plan.record, sum([n for _, n in behind])
        room = min(n_behind, self.max_chunk - len(plan.spans))
        spent_ns = record.reserve_ns + record.admission_ns
        size = self.chunks.size(plan.work, n_behind, room, behind[0][0].n_computed, spent_ns)
        record.n_small = int(size < min(room, self.chunks.min_chunk))
        for sequence, n in behind:
            if not size:
                return
            count = min(n, size)
            plan.spans.append(Span(sequence, sequence.n_computed, count))
            plan.work = plan.work.with_chunk(count, sequence.n_computed)
            size -= count
