"""Blocks in two groups of layers: rings, prefixes that both have, what a sequence takes."""

from __future__ import annotations

import pytest
from fake_engine import BLOCK_TOKENS, FakeEngine, carry_out, kv_of, scheduler_of, sequence_of
from fake_model import alone, engine_of
from hypothesis import given
from hypothesis import strategies as st

from xpuc.runtime.kv_blocks import KvBlocks, ring_blocks
from xpuc.runtime.plan import Copy
from xpuc.runtime.scheduler import Scheduler
from xpuc.runtime.sequence import Request, Sequence

WINDOW, MAX_CHUNK = 6, 8


def windowed(n_blocks: tuple[int, int] = (12, 8), **other: bool) -> KvBlocks:
    return kv_of(n_blocks, (0, WINDOW), max_chunk=MAX_CHUNK, **other)


def read(kv: KvBlocks, sequence: Sequence, n_computed: int) -> None:
    """Its tokens up to there, in steps of two, which begin inside a block and at its start."""
    for n in range(sequence.n_computed + 2, n_computed + 1, 2):
        assert kv.grow(sequence, len(sequence.tokens), [])
        kv.advance(sequence, n)


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("max_chunk", range(1, 10))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_ring_is_as_long_as_it_must_be(window: int, max_chunk: int, size: int) -> None:
    lengths = set()
    for n_computed in range(40, 40 + size):
        seen = range(n_computed - window + 1, n_computed + max_chunk)
        lengths.add(len({position // size for position in seen}))
    assert ring_blocks(window, max_chunk, size) == max(lengths)


def test_places_that_no_row_sees_are_given_back() -> None:
    kv = windowed()
    sequence = sequence_of(0, 30)
    assert kv.borrow(sequence, 30)
    assert [len(blocks) for blocks in sequence.blocks] == [8, 4]
    kv.slide(sequence, 8)  # the row at 8 sees tokens from 3 on
    assert sequence.blocks[1][0] >= 0
    kv.slide(sequence, 9)
    assert sequence.blocks[1][0] == -1
    assert kv.groups[1].pool.n_used == 3
    assert kv.grow(sequence, 30, [])
    assert (len(sequence.blocks[1]), kv.groups[1].pool.n_used) == (5, 4)
    assert sequence.n_room == 20
    kv.slide(sequence, 25)
    assert sequence.blocks[1] == [-1] * 5
    kv.release(sequence)
    kv.check()
    assert kv.n_used == 0


def test_a_prefix_ends_where_its_window_is_still_there() -> None:
    kv = windowed((12, 8))
    first, again = sequence_of(0, 30, first=0), sequence_of(1, 30, first=0)
    assert kv.start(first, 30)
    read(kv, first, 28)
    kv.release(first)
    # All seven full blocks are cached in both groups: the eighth of the windowed was never written.
    assert kv.start(again, 30)
    assert (again.n_computed, again.blocks[1][:5]) == (28, [-1] * 5)
    kv.release(again)
    pool = kv.groups[1].pool
    blocks = pool.allocate(pool.n_free)  # nothing of the windowed group is left
    pool.free(blocks)
    assert len(kv.groups[0].pool.match(first.links)) == 7
    assert kv.start(again, 30)
    assert again.n_computed == 0


def test_a_hole_in_the_window_ends_the_prefix_before_it() -> None:
    kv = windowed((12, 12))
    first, again = sequence_of(0, 30, first=0), sequence_of(1, 30, first=0)
    assert kv.start(first, 30)
    read(kv, first, 28)
    kv.release(first)
    kv.groups[1].pool.forget(first.links[5])
    assert kv.start(again, 30)
    # A row after six or seven blocks would see the sixth; one after five sees the fourth and fifth.
    assert again.n_computed == 5 * BLOCK_TOKENS
    assert [block >= 0 for block in again.blocks[1][:5]] == [False, False, False, True, True]
    kv.check()


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 8))))
def test_the_longest_prefix_is_found_that_every_group_can_go_on_from(
    holes: set[tuple[int, int]],
) -> None:
    windows = (0, WINDOW, 13)
    kv = kv_of((12, 12, 12), windows, max_chunk=MAX_CHUNK)
    first, again = sequence_of(0, 38, first=0), sequence_of(1, 38, first=0)
    assert kv.start(first, 38)
    read(kv, first, 38)
    kv.release(first)
    for g, place in holes:
        kv.groups[g].pool.forget(first.links[place])
    assert kv.start(again, 38)

    def goes_on(n: int) -> bool:
        seen = (
            (g, position // BLOCK_TOKENS)
            for g, window in enumerate(windows)
            for position in range(max(0, n - window + 1) if window else 0, n)
        )
        return not holes.intersection(seen)

    assert again.n_computed == max(n for n in range(0, 38, BLOCK_TOKENS) if goes_on(n))


@pytest.mark.parametrize(
    ("free", "length", "headroom", "fits"),
    [
        ((3, 4), 12, 0, True),
        ((3, 4), 12, 1, False),
        ((4, 3), 12, 0, True),
        ((4, 3), 12, 1, False),
        ((4, 4), 12, 1, True),
        ((8, 4), 30, 1, True),  # all of one, and a ring of the other
        ((8, 3), 30, 0, False),
    ],
)
def test_admission_asks_each_group_for_what_it_lacks(
    free: tuple[int, int], length: int, headroom: int, fits: bool
) -> None:
    kv = windowed((8, 6))
    for group, n in zip(kv.groups, free, strict=True):
        group.pool.allocate(group.pool.n_blocks - n)
    sequence = sequence_of(0, length)
    assert kv.start(sequence, length, headroom) is fits
    n_taken = [n - group.pool.n_free for group, n in zip(kv.groups, free, strict=True)]
    assert n_taken == (
        [-(-length // BLOCK_TOKENS), min(-(-length // BLOCK_TOKENS), 4)] if fits else [0, 0]
    )


def test_the_longest_sequence_is_what_the_groups_hold() -> None:
    assert windowed((12, 4)).max_tokens == 12 * BLOCK_TOKENS
    assert windowed((12, 3)).max_tokens == 3 * BLOCK_TOKENS, "less than a ring"
    assert kv_of(4, (WINDOW,), max_chunk=MAX_CHUNK).max_tokens > 1 << 40


def test_forks_share_and_copy_in_every_group() -> None:
    kv = windowed()
    parent = sequence_of(0, 18)
    assert kv.start(parent, 18)
    read(kv, parent, 18)
    child = Sequence(Request(1, parent.request.prompt_ids))
    child.links[:] = parent.links
    kv.fork(parent, child)
    for each in (parent, child):
        each.tokens.append(1)
    assert child.blocks[1] == parent.blocks[1]
    assert [group.pool.n_used for group in kv.groups] == [5, 2]
    copies: list[Copy] = []
    shared = [blocks[4] for blocks in parent.blocks]
    assert kv.grow(child, 19, copies)
    assert copies == [Copy(g, shared[g], child.blocks[g][4]) for g in (0, 1)]
    assert (child.epoch, parent.epoch) == (1, 0)
    assert kv.grow(parent, 19, copies)
    assert len(copies) == 2, "the last one keeps the block"
    for each in (parent, child):
        kv.advance(each, 19)
        kv.release(each)
    kv.check()
    assert kv.n_used == 0


def test_what_a_failed_sequence_gave_back_is_not_found_either() -> None:
    kv = windowed()
    first = sequence_of(0, 30, first=0)
    assert kv.start(first, 30)
    read(kv, first, 28)
    assert any(True for _ in kv.groups[1].pool.cached())
    kv.withdraw(first)
    kv.release(first)
    assert not any(True for group in kv.groups for _ in group.pool.cached())


def finish(scheduler: Scheduler, engine: FakeEngine, sequence: Sequence) -> None:
    scheduler.add(sequence)
    while not sequence.n_generated:
        plan = scheduler.plan()
        engine.run(plan)
        carry_out(scheduler, plan)
    scheduler.finish(sequence, "stop")


def test_a_prefix_comes_back_from_the_store_in_every_group() -> None:
    scheduler = scheduler_of((8, 6), (0, WINDOW))
    engine = FakeEngine(scheduler, has_store=True)
    first, again, torn = (sequence_of(n, 30, first=0) for n in (0, 2, 4))
    finish(scheduler, engine, first)
    finish(scheduler, engine, sequence_of(1, 30))  # takes the place of the first
    scheduler.add(again)
    plan = scheduler.plan()
    assert [(span.start, span.count) for span in plan.spans] == [(28, 2)]
    engine.run(plan)
    counters = scheduler.kv.counters
    assert (counters.hit_tokens, counters.store_tokens) == (0, 28)
    scheduler.finish(again, "stop")
    finish(scheduler, engine, sequence_of(3, 30))
    engine.torn.add((1, first.links[6].digest))
    scheduler.add(torn)
    plan = scheduler.plan()
    assert plan.spans[0].start == 24, "the longest prefix whose window the store still has"
    engine.run(plan)
    carry_out(scheduler, plan)
    scheduler.kv.check()


def test_texts_past_the_window_are_scored_in_its_ring() -> None:
    ids = [n * 7 % 96 for n in range(90)]
    expected = engine_of(windows=(0, WINDOW), max_chunk=96, max_out_rows=96).score(ids)
    engine = engine_of(windows=(0, WINDOW), n_blocks=(23, 6), max_chunk=16)
    assert engine.score(ids) == engine.score(ids, chunk=3) == expected
    assert engine.kv.n_used == 0


def test_answers_in_a_ring_are_those_of_one_call() -> None:
    prompt = [n * 7 % 96 for n in range(50)]
    engine = engine_of(windows=(0, WINDOW), n_blocks=(30, 9), max_chunk=8)
    results = engine.generate([prompt, prompt[5:], prompt[9:]], max_tokens=30, temperature=0)
    for asked, result in zip((prompt, prompt[5:], prompt[9:]), results, strict=True):
        assert result.ids == alone(asked, (0, WINDOW), max_tokens=30, temperature=0).ids
    assert engine.scheduler.counters.sums["n_preempted"] > 0
