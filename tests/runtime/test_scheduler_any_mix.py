"""Whatever comes, on any policy: nobody starves, and every block has as many owners as hold it."""

from __future__ import annotations

import random
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
from xpuc.runtime.speculation import Drafter, Speculation

MAX_ROWS = 5  # of a decode call
# Windows and blocks of each group: a row sees tokens of one to four blocks, or all of them.
GROUPS = (
    ((0,), (10,)),
    ((0, 6), (10, 5)),
    ((0, 1), (10, 3)),
    ((0, 9, 4), (10, 12, 4)),
    ((7,), (9,)),
    ((0, 40), (10, 9)),
)


def held_in(sequence: Sequence, g: int) -> list[int]:
    return [block for block in sequence.blocks[g] if block >= 0] if sequence.blocks else []


def ring(window: int) -> int:
    """The most blocks that the tokens of a step and those its first row sees can lie in."""
    n = window - 1 + MAX_CHUNK
    return max(
        len({position // BLOCK_TOKENS for position in range(start, start + n)})
        for start in range(BLOCK_TOKENS)
    )


class Scheduling(RuleBasedStateMachine):
    """Any requests, forks, ends and policies, on a clock of its own that runs with the work."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "lpm", "vllm"]),
        reuse=st.booleans(),
        has_store=st.booleans(),
        groups=st.sampled_from(GROUPS),
        draft_max=st.sampled_from([0, 1, 6]),
    )
    def start(
        self,
        policy: str,
        reuse: bool,
        has_store: bool,
        groups: tuple[tuple[int, ...], ...],
        draft_max: int,
    ) -> None:
        self.now = 0
        self.policy = policy
        self.windows, n_blocks = groups
        self.scheduler = scheduler_of(
            n_blocks, self.windows, policy=policy, reuse=reuse, clock=lambda: self.now,
            drafter=Drafter(Speculation(draft_max, 1, 2), max_rows=MAX_ROWS),
        )  # fmt: skip
        self.random = random.Random(draft_max)
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

    @precondition(lambda self: any(self.engine.stored))
    @rule(data=st.data())
    def damage_the_store(self, data: st.DataObject) -> None:
        keys = [(g, digest) for g, each in enumerate(self.engine.stored) for digest in each]
        self.engine.torn.add(data.draw(st.sampled_from(keys)))

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
        carry_out(self.scheduler, plan, lambda: self.random.randrange(2))
        for span in plan.spans:
            sequence = span.sequence
            if span.drafts and sequence.state is State.RUNNING:
                n_computed = span.start + 1 + span.n_accepted
                assert sequence.n_computed == n_computed == len(sequence.tokens) - 1
                assert sequence.n_room == -(-n_computed // BLOCK_TOKENS) * BLOCK_TOKENS

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
        if any(span.drafts for span in spans):
            assert sum(1 + len(span.drafts) for span in spans) <= MAX_ROWS
            assert {(span.count, span.sequence.n_pending) for span in spans} == {(1, 1)}
        assert min(rows, default=1) > 0
        assert len({span.sequence.request.id for span in spans}) == len(spans)
        is_decode = [span.sequence.n_pending == 1 for span in spans]
        if self.policy != "vllm":
            assert is_decode == sorted(is_decode, reverse=True), "a prompt before a decoding row"
        for each in self.scheduler.running:
            has_span = any(span.sequence is each for span in spans)
            assert has_span or sum(rows) == MAX_CHUNK, "a sequence waits though there is room"
        for span in spans:
            assert span.start == span.sequence.n_computed
            end = span.start + span.count + len(span.drafts)
            assert end <= span.sequence.n_room
            assert end < MAX_CONTEXT or not span.drafts, "a draft beyond the end"

    @invariant()
    def blocks_have_as_many_owners_as_hold_them(self) -> None:
        for g, group in enumerate(self.scheduler.kv.groups):
            pool = group.pool
            pool.check()
            held = [block for each in self.all for block in held_in(each, g)]
            assert len(set(held)) == pool.n_used == pool.n_blocks - pool.n_free
            assert all(pool.n_owners(block) == held.count(block) for block in held)

    @invariant()
    def a_window_is_held_and_no_more_than_a_ring(self) -> None:
        for each in self.scheduler.running:
            for g, window in enumerate(self.windows):
                first = max(0, each.n_computed - window + 1) if window else 0
                seen = {position // BLOCK_TOKENS for position in range(first, each.n_computed)}
                assert all(each.blocks[g][place] >= 0 for place in seen), "a row lacks a block"
                before = each.blocks[g][: first // BLOCK_TOKENS]
                assert all(block < 0 for block in before), "a block that no row sees is held"
                assert not window or len(held_in(each, g)) <= ring(window)

    @invariant()
    def what_is_found_is_what_its_hash_says(self) -> None:
        texts = {
            link.digest: self.engine.text(each)[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
            for each in self.all
            for place, link in enumerate(each.links)
        }
        for g, group in enumerate(self.scheduler.kv.groups):
            for block, link in group.pool.cached():
                assert self.engine.pools[g][block] == texts[link.digest]

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
        assert self.scheduler.kv.n_used == 0


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
