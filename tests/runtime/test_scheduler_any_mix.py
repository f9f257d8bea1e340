"""Whatever comes, on any policy: nobody starves, and every block has as many owners as hold it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from fake_engine import (
    BLOCK_TOKENS,
    MAX_BATCH,
    MAX_CHUNK,
    MAX_CONTEXT,
    QUEUE,
    FakeEngine,
    carry_out,
    scheduler_of,
    sequence_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from xpuc.errors import RequestError
from xpuc.runtime.plan import Span
from xpuc.runtime.sequence import Request, Sequence, State


class Scheduling(RuleBasedStateMachine):
    """Any requests, forks, ends and policies, on a clock of its own that runs with the work."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "lpm", "vllm"]),
        reuse=st.booleans(),
        has_store=st.booleans(),
    )
    def start(self, policy: str, reuse: bool, has_store: bool) -> None:
        self.now = 0
        self.policy = policy
        self.scheduler = scheduler_of(policy=policy, reuse=reuse, clock=lambda: self.now)
        self.engine = FakeEngine(self.scheduler, has_store=has_store)
        self.all: list[Sequence] = []
        self.resumable: list[Sequence] = []  # preempted, in the order they resume

    @rule(
        n_prompt=st.integers(1, 12) | st.integers(0, MAX_CONTEXT + 4),
        first=st.integers(0, 1) | st.none(),
        priority=st.integers(0, 2),
    )
    def add(self, n_prompt: int, first: int | None, priority: int) -> None:
        prompt = sequence_of(len(self.all), n_prompt, first=first).tokens
        sequence = Sequence(Request(len(self.all), tuple(prompt), priority=priority))
        fits = 0 < n_prompt < MAX_CONTEXT and len(self.scheduler.waiting) < QUEUE
        if not fits:
            with pytest.raises(RequestError):
                self.scheduler.add(sequence)
            assert sequence.state is State.NEW
            return
        self.scheduler.add(sequence)
        self.all.append(sequence)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "cancelled", "error"]))
    def end_any(self, data: st.DataObject, reason: Any) -> None:
        sequence = data.draw(st.sampled_from(self.all))
        was = sequence.finish_reason
        self.scheduler.finish(sequence, reason)
        assert sequence.state is State.FINISHED
        assert sequence.finish_reason == (was or reason)
        assert not sequence.blocks

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.scheduler.running))
        request = Request(len(self.all), parent.request.prompt_ids)
        child = Sequence(request)
        self.scheduler.fork(parent, child)
        self.all.append(child)
        if child.state is State.PREEMPTED:
            self.resumable.append(child)

    @rule(n=st.integers(1, 8))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self._step(None)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def cancel_within_a_step(self, data: st.DataObject) -> None:
        self._step(data.draw(st.sampled_from(self.scheduler.running)))

    def _step(self, cancelled: Sequence | None) -> None:
        before = {each: each.state for each in self.all}
        plan = self.scheduler.plan()
        yielded = self._moved(before, State.RUNNING, State.PREEMPTED)
        resumed = self._moved(before, State.PREEMPTED, State.RUNNING)
        admitted = self._moved(before, State.WAITING, State.RUNNING)
        record = plan.record
        counts = (record.n_preempted, record.n_resumed, record.n_admitted)
        assert counts == (len(yielded), len(resumed), len(admitted))
        if yielded:
            assert not resumed
            assert not admitted
            if self.policy != "vllm":
                last = max((each.rank for each in self.scheduler.running), default=(-1, -1))
                assert all(each.rank > last for each in yielded), "older work yielded to newer"
        self._check_order(before, yielded, resumed, admitted)
        self._check_spans(plan.spans)
        if cancelled is not None:
            self.scheduler.finish(cancelled, "cancelled")
        self.engine.run(plan)
        self.now += 1_000_000 + 100_000 * record.n_rows
        carry_out(self.scheduler, plan)

    def _moved(self, before: dict[Sequence, State], a: State, b: State) -> list[Sequence]:
        return [each for each in self.all if before[each] is a and each.state is b]

    def _check_order(
        self,
        before: dict[Sequence, State],
        yielded: list[Sequence],
        resumed: list[Sequence],
        admitted: list[Sequence],
    ) -> None:
        queue = [each for each in self.resumable if before[each] is State.PREEMPTED]
        assert set(resumed) == set(queue[: len(resumed)]), "resumed out of turn"
        assert not admitted or len(resumed) == len(queue), "a newcomer passed a preempted one"
        waiting = [each for each in self.all if before[each] is State.WAITING]
        waiting.sort(key=lambda each: each.rank)
        if self.policy != "lpm":
            assert set(admitted) == set(waiting[: len(admitted)]), "admitted out of turn"
        if self.policy == "vllm":
            assert list(self.scheduler.preempted)[: len(yielded)] == yielded
            self.resumable = yielded + queue[len(resumed) :]
        else:
            yielded.sort(key=lambda each: each.rank, reverse=True)
            self.resumable = queue[len(resumed) :] + yielded
        assert list(self.scheduler.preempted) == self.resumable

    def _check_spans(self, spans: list[Span]) -> None:
        rows = [span.count for span in spans]
        assert sum(rows) <= MAX_CHUNK
        assert min(rows, default=1) > 0
        assert len({span.sequence.request.id for span in spans}) == len(spans)
        is_decode = [span.sequence.n_pending == 1 for span in spans]
        if self.policy != "vllm":
            assert is_decode == sorted(is_decode, reverse=True), "a prompt before a decoding row"
        for each in self.scheduler.running:
            has_span = any(span.sequence is each for span in spans)
            is_filled = each.n_computed == len(each.blocks) * BLOCK_TOKENS  # vLLM's: by the store
            is_full = sum(rows) == MAX_CHUNK or (is_filled and self.policy == "vllm")
            assert has_span or is_full, "a sequence waits though there is room"
        for span in spans:
            assert span.start == span.sequence.n_computed
            assert span.start + span.count <= len(span.sequence.blocks) * BLOCK_TOKENS

    @invariant()
    def blocks_have_as_many_owners_as_hold_them(self) -> None:
        pool = self.scheduler.pool
        pool.check()
        held = [block for each in self.all for block in each.blocks]
        assert len(set(held)) == pool.n_used
        assert all(pool.n_owners(block) == held.count(block) for block in held)

    @invariant()
    def states_and_queues_agree(self) -> None:
        running = self.scheduler.running
        if self.policy != "vllm":
            assert running == sorted(running, key=lambda each: each.rank)
        assert len(running) <= MAX_BATCH
        queues: dict[State, Iterable[Sequence]] = {
            State.WAITING: self.scheduler.waiting,
            State.PREEMPTED: self.scheduler.preempted,
            State.RUNNING: running,
        }
        for state, queue in queues.items():
            assert {each for each in self.all if each.state is state} == set(queue)

    def teardown(self) -> None:
        """Everything ends, and nobody waits longer than it takes those before it to end.

        Of the sequences that are left each step brings the first forward by a token at least.
        """
        if not hasattr(self, "scheduler"):
            return
        left = [each for each in self.all if each.state is not State.FINISHED]
        for _ in range((len(left) + 1) * 2 * MAX_CONTEXT):
            if not self.scheduler.has_work:
                break
            self._step(None)
        assert all(each.state is State.FINISHED for each in self.all), "a request never ends"
        assert self.scheduler.pool.n_used == 0


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
