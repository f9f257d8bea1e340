"""Continuous batching: who runs, who yields, who is refused; nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xpuc.errors import RequestError
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.scheduler import Scheduler, Span
from xpuc.runtime.sequence import Request, Sequence, State

BLOCK_TOKENS, N_BLOCKS, MAX_BATCH, MAX_CHUNK, MAX_CONTEXT, QUEUE = 4, 10, 3, 8, 32, 5


def scheduler_of(**other: int) -> Scheduler:
    n_blocks = other.pop("n_blocks", N_BLOCKS)
    sizes = {"max_batch": MAX_BATCH, "max_chunk": MAX_CHUNK, "max_context": MAX_CONTEXT}
    return Scheduler(BlockPool(n_blocks), BLOCK_TOKENS, **(sizes | {"queue_bound": QUEUE} | other))


def sequence_of(id_: int, n_prompt: int) -> Sequence:
    return Sequence(Request(id_, tuple(range(n_prompt))))


def carry_out(scheduler: Scheduler, spans: list[Span]) -> None:
    """What the engine does with a plan, with tokens that never end a sequence."""
    for span in spans:
        is_last = span.is_last
        scheduler.advance(span)
        if is_last:
            span.sequence.tokens.append(0)
            if len(span.sequence.tokens) >= scheduler.max_tokens:
                scheduler.finish(span.sequence, "length")


class Scheduling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_of()
        self.all: list[Sequence] = []
        self.resumable: list[Sequence] = []  # preempted, in the order it happened

    @rule(n_prompt=st.integers(1, 12) | st.integers(0, MAX_CONTEXT + 4))
    def add(self, n_prompt: int) -> None:
        sequence = sequence_of(len(self.all), n_prompt)
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
    def end_any(self, data: st.DataObject, reason: str) -> None:
        sequence = data.draw(st.sampled_from(self.all))
        was = sequence.finish_reason
        self.scheduler.finish(sequence, reason)  # type: ignore[arg-type]
        assert sequence.state is State.FINISHED
        assert sequence.finish_reason == (was or reason)
        assert not sequence.blocks

    @rule(n=st.integers(1, 8))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self._step()

    def _step(self) -> None:
        before = {each: each.state for each in self.all}
        spans = self.scheduler.plan()
        yielded = self._moved(before, State.RUNNING, State.PREEMPTED)
        resumed = self._moved(before, State.PREEMPTED, State.RUNNING)
        admitted = self._moved(before, State.WAITING, State.RUNNING)
        if yielded:
            assert not resumed
            assert not admitted
            running = [each.request.id for each in self.scheduler.running]
            assert all(each.request.id > max(running, default=-1) for each in yielded)
        self._check_order(before, yielded, resumed, admitted)
        self._check_spans(spans)
        carry_out(self.scheduler, spans)

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
        assert admitted == waiting[: len(admitted)], "admitted out of turn"
        self.resumable = queue[len(resumed) :] + yielded[::-1]

    def _check_spans(self, spans: list[Span]) -> None:
        rows = [span.count for span in spans]
        assert sum(rows) <= MAX_CHUNK
        assert len({span.sequence.request.id for span in spans}) == len(spans)
        is_decode = [span.sequence.n_pending == 1 for span in spans]
        assert is_decode == sorted(is_decode, reverse=True), "a prompt before a decoding row"
        for each in self.scheduler.running:
            has_span = any(span.sequence is each for span in spans)
            assert has_span or sum(rows) == MAX_CHUNK, "a sequence waits though there is room"
        for span in spans:
            assert span.start == span.sequence.n_computed
            assert span.start + span.count <= len(span.sequence.blocks) * BLOCK_TOKENS

    @invariant()
    def blocks_are_owned_once(self) -> None:
        self.scheduler.pool.check()
        owned = [block for each in self.all for block in each.blocks]
        assert len(owned) == len(set(owned)) == self.scheduler.pool.n_used

    @invariant()
    def states_and_queues_agree(self) -> None:
        ids = [each.request.id for each in self.scheduler.running]
        assert ids == sorted(ids)
        assert len(ids) <= MAX_BATCH
        queues = {
            State.WAITING: list(self.scheduler.waiting),
            State.PREEMPTED: list(self.scheduler.preempted),
            State.RUNNING: self.scheduler.running,
        }
        for state, queue in queues.items():
            assert {each for each in self.all if each.state is state} == set(queue)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            carry_out(self.scheduler, self.scheduler.plan())
        assert all(each.state is State.FINISHED for each in self.all), "a request never ends"
        assert self.scheduler.pool.n_used == 0


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_decoding_rows_come_first_and_chunks_fill_the_rest() -> None:
    scheduler = scheduler_of()
    decoding, long, late = sequence_of(0, 1), sequence_of(1, 12), sequence_of(2, 5)
    scheduler.add(long)
    scheduler.add(decoding)
    scheduler.add(late)
    assert scheduler.plan() == [Span(decoding, 0, 1), Span(long, 0, 7)]


def test_admission_wants_a_block_of_headroom() -> None:
    scheduler = scheduler_of(n_blocks=4)
    scheduler.add(sequence_of(0, 4))  # 1 block and 1 to spare of 4
    scheduler.add(sequence_of(1, 12))  # 3 blocks are free, 4 are wanted
    assert [span.sequence.request.id for span in scheduler.plan()] == [0]


def test_headroom_is_not_asked_of_a_sequence_as_long_as_the_pool() -> None:
    scheduler = scheduler_of(n_blocks=4, max_chunk=16)
    scheduler.add(sequence_of(0, 15))
    assert [span.count for span in scheduler.plan()] == [15]


def states_of(*sequences: Sequence) -> list[State]:
    return [each.state for each in sequences]


def test_a_step_that_preempts_admits_nobody_and_the_next_no_newcomer() -> None:
    scheduler = scheduler_of(n_blocks=5, max_chunk=16)
    older, younger, newcomer = sequence_of(0, 8), sequence_of(1, 8), sequence_of(2, 1)
    scheduler.add(older)
    scheduler.add(younger)
    carry_out(scheduler, scheduler.plan())  # both have 2 blocks, both want a third: one is free
    scheduler.add(newcomer)
    assert scheduler.plan() == [Span(older, 8, 1)]
    assert states_of(older, younger, newcomer) == [State.RUNNING, State.PREEMPTED, State.WAITING]
    assert (younger.n_computed, younger.blocks, scheduler.pool.n_free) == (0, [], 2)
    assert (older.epoch, younger.epoch) == (0, 1), "a batch would trust the blocks it wrote before"
    # The newcomer's 2 blocks are free, but the preempted one comes first, and wants 4.
    assert scheduler.plan() == [Span(older, 8, 1)]
    scheduler.finish(older, "stop")
    assert scheduler.plan() == [Span(newcomer, 0, 1), Span(younger, 0, 9)]


def test_the_youngest_yields_and_the_first_that_yielded_resumes_first() -> None:
    scheduler = scheduler_of(n_blocks=6, max_chunk=16)
    oldest, middle, youngest = (sequence_of(n, 4) for n in range(3))
    for each in (oldest, middle, youngest):
        scheduler.add(each)
    seen = []
    while middle.state is not State.PREEMPTED:
        carry_out(scheduler, scheduler.plan())
        if (states := states_of(oldest, middle, youngest)) not in seen:
            seen.append(states)
    run, out = State.RUNNING, State.PREEMPTED
    assert seen == [[run, run, run], [run, run, out], [run, out, out]]
    scheduler.finish(oldest, "stop")
    # The youngest wants 4 of 6 blocks, the middle one 5: only the first in the queue fits.
    assert scheduler.plan() == [Span(youngest, 0, 9)]


def test_what_never_fits_is_refused_at_once() -> None:
    scheduler = scheduler_of(n_blocks=4)
    with pytest.raises(RequestError, match="17 tokens; the context holds 16"):
        scheduler.add(sequence_of(0, 17))
    with pytest.raises(RequestError, match="the prompt has 32 tokens; the context holds 32"):
        scheduler_of().add(sequence_of(0, 32))
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(sequence_of(0, 0))
    assert not scheduler.has_work


def test_the_queue_is_bounded() -> None:
    scheduler = scheduler_of()
    for id_ in range(QUEUE):
        scheduler.add(sequence_of(id_, 2))
    with pytest.raises(RequestError, match="server busy, please try again") as refused:
        scheduler.add(sequence_of(QUEUE, 2))
    assert refused.value.hint == f"{QUEUE} requests are waiting already; try again later"
    assert Scheduler(BlockPool(1), 1, max_batch=1, max_chunk=1, max_context=1).queue_bound == 512
