"""The arrays of a step: what stands in them, that they are reused, how tiles are ordered."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fake_model import FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.runtime.batch import Batch, balanced
from xpuc.runtime.scheduler import Span
from xpuc.runtime.sequence import Request, Sequence


def sequence_of(tokens: list[int], blocks: list[int], n_computed: int = 0) -> Sequence:
    sequence = Sequence(Request(0, tuple(tokens)))
    sequence.blocks, sequence.n_computed = [blocks], n_computed
    return sequence


def test_a_decode_batch_is_padded_to_its_bucket() -> None:
    batch = Batch(FakeModel(block_tokens=4, segment_tokens=8, buckets=(1, 2, 4)))
    one = sequence_of(list(range(10, 20)), [7, 3, 9])
    two = sequence_of([30, 31], [5])
    three = sequence_of([40], [1])
    batch.fill([Span(one, 9, 1), Span(two, 1, 1), Span(three, 0, 1)])
    assert batch.kind == "cols"
    assert batch.n_rows == 4
    assert batch.tokens.tolist() == [19, 31, 40, 0]
    assert batch.positions.tolist() == [9, 1, 0, 0]
    assert batch.slots[0].tolist() == [9 * 4 + 1, 5 * 4 + 1, 1 * 4, -1]
    assert batch.tiles.tolist() == [[0, 1, 0, 2], [1, 1, 2, 1], [2, 1, 3, 1]]
    assert batch.work.tolist() == [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 0], [2, 1, 2, 0]]
    assert batch.block_tables[0][:, :3].tolist() == [[7, 3, 9], [5, 0, 0], [1, 0, 0]]
    assert batch.out_rows.tolist() == [0, 1, 2]


def test_drafts_are_rows_of_their_own_in_their_sequences_blocks() -> None:
    batch = Batch(FakeModel(block_tokens=4, segment_tokens=8, buckets=(1, 2, 4, 8), max_batch=8))
    one = sequence_of(list(range(10, 17)), [7, 3, 9])
    two = sequence_of([30, 31], [5])
    batch.fill(
        [Span(one, 6, 1, (50, 51)), Span(two, 1, 1), Span(three := sequence_of([4], [1]), 0, 1)]
    )
    assert (batch.kind, batch.n_rows) == ("cols", 8)
    assert batch.tokens.tolist() == [16, 50, 51, 31, 4, 0, 0, 0]
    assert batch.positions.tolist() == [6, 7, 8, 1, 0, 0, 0, 0]
    assert batch.slots[0].tolist() == [3 * 4 + 2, 3 * 4 + 3, 9 * 4, 5 * 4 + 1, 4, -1, -1, -1]
    assert batch.tiles.tolist() == [
        [0, 1, 0, 1],
        [1, 1, 1, 1],
        [2, 1, 2, 2],
        [3, 1, 4, 1],
        [4, 1, 5, 1],
    ]
    assert batch.work.tolist() == [
        [0, 1, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0], [2, 1, 0, 1], [3, 1, 1, 0], [4, 1, 2, 0],
    ]  # fmt: skip
    assert batch.block_tables[0][:, :3].tolist() == [[7, 3, 9], [5, 0, 0], [1, 0, 0]]
    assert batch.out_rows.tolist() == [0, 1, 2, 3, 4]
    for n in (0, 1, 0):  # as many rows in as many segments, but of other sequences
        spans = [Span(one, 6, 1, (50,) * n), Span(two, 1, 1, (60, 61)[n:]), Span(three, 0, 1)]
        batch.fill(spans)
        assert batch.tokens.tolist() == [[16, 31, 60, 61, 4], [16, 50, 31, 61, 4]][n] + [0] * 3
        assert batch.work[:, 2].tolist() == [[0, 1, 1, 1, 2], [0, 0, 1, 1, 2]][n]


def test_chunks_and_decoding_rows_share_a_prefill_call() -> None:
    batch = Batch(FakeModel(block_tokens=4, segment_tokens=8, tile_rows=4, max_chunk=16))
    decoding = sequence_of(list(range(10, 20)), [7, 3, 9])
    ends = sequence_of(list(range(50, 56)), [2, 4])
    goes_on = sequence_of(list(range(60, 80)), [8, 6, 0, 1, 5])
    batch.fill([Span(decoding, 9, 1), Span(ends, 0, 6), Span(goes_on, 4, 5)])
    assert batch.kind == "prefill"
    assert batch.tokens.tolist() == [19, *range(50, 56), *range(64, 69)]
    assert batch.positions.tolist() == [9, *range(6), *range(4, 9)]
    assert batch.slots[0].tolist() == [37, 8, 9, 10, 11, 16, 17, 24, 25, 26, 27, 0]
    rows = sorted((row, n) for row, n, _, _ in batch.tiles.tolist())
    assert rows == [(0, 1), (1, 4), (5, 2), (7, 4), (11, 1)]
    for row, n, first, n_work in batch.tiles.tolist():
        items = batch.work[first : first + n_work].tolist()
        seq = 0 if row == 0 else 1 if row < 7 else 2
        n_segments = batch.positions[row + n - 1] // 8 + 1
        assert items == [[row, n, seq, segment] for segment in range(n_segments)]
    assert batch.out_rows.tolist() == [0, 6]


def test_a_chunk_of_one_row_that_is_not_the_last_is_no_decode() -> None:
    batch = Batch(FakeModel())
    goes_on, decoding = sequence_of([1, 2, 3], [0]), sequence_of([4], [1])
    batch.fill([Span(decoding, 0, 1), Span(goes_on, 0, 1)])
    assert batch.kind == "prefill"
    assert batch.out_rows.tolist() == [0]


def test_a_step_without_a_wanted_row_names_its_last() -> None:
    batch = Batch(FakeModel())
    batch.fill([Span(sequence_of(list(range(9)), [0, 1, 2]), 0, 8)])
    assert batch.out_rows.tolist() == [7]


def test_more_rows_than_the_largest_bucket_go_through_prefill() -> None:
    batch = Batch(FakeModel(max_batch=6, buckets=(1, 2)))
    batch.fill([Span(sequence_of([n], [n]), 0, 1) for n in range(3)])
    assert (batch.kind, batch.n_rows) == ("prefill", 3)


def test_every_row_is_wanted_when_asked() -> None:
    batch = Batch(FakeModel())
    sequence = sequence_of(list(range(9)), [0, 1, 2])
    batch.fill([Span(sequence, 0, 6)], every_row=True)
    assert batch.out_rows.tolist() == list(range(6))
    batch.fill([Span(sequence, 3, 1)], every_row=True)
    assert batch.out_rows.tolist() == [0]


def test_blocks_that_replace_others_are_written_again() -> None:
    batch = Batch(FakeModel(block_tokens=4))
    sequence = sequence_of(list(range(9)), [5, 6, 7])
    batch.fill([Span(sequence, 8, 1)])
    sequence.blocks = [[1, 2, 3]]  # preempted and admitted again
    sequence.epoch += 1
    batch.fill([Span(sequence, 8, 1)])
    assert batch.block_tables[0][0, :3].tolist() == [1, 2, 3]
    assert batch.slots[0].tolist() == [12]


def test_each_group_has_slots_and_a_block_table() -> None:
    batch = Batch(FakeModel(block_tokens=4, windows=(0, 6), max_chunk=8))
    one, two = sequence_of(list(range(14)), [7, 3, 9, 2]), sequence_of([30, 31], [5])
    one.blocks.append([1, 4, 8])  # the last block of the other group is for tokens to come
    two.blocks.append([6])
    batch.fill([Span(one, 8, 2), Span(two, 0, 2)])
    assert [slots.tolist() for slots in batch.slots] == [[36, 37, 20, 21], [32, 33, 24, 25]]
    tables = [table[:, :4].tolist() for table in batch.block_tables]
    assert tables == [[[7, 3, 9, 2], [5, 0, 0, 0]], [[1, 4, 8, 0], [6, 0, 0, 0]]]
    one.blocks[1] = [-1, 4, 8, 1]  # one was given back, and taken again at the end
    one.tokens.append(0)
    batch.fill([Span(one, 14, 1)])
    assert [slots.tolist() for slots in batch.slots] == [[10], [6]]
    assert batch.block_tables[1][0, 1:4].tolist() == [4, 8, 1]
    operands = (
        batch.tokens, batch.positions, batch.slots[0], batch.tiles, batch.work,
        batch.block_tables[0], batch.out_rows, batch.slots[1], batch.block_tables[1],
    )  # fmt: skip
    assert [id(view) for view in batch.views] == [id(view) for view in operands]


def test_arrays_start_where_vectors_may_be_read() -> None:
    batch = Batch(FakeModel())
    batch.fill([Span(sequence_of([1, 2, 3], [0]), 0, 3)])
    assert {view.ctypes.data % 64 for view in batch.views} == {0}


def test_decoding_makes_no_array_and_keeps_no_memory() -> None:
    model = FakeModel(max_context=1024, n_blocks=64, block_tokens=16, segment_tokens=128)
    batch = Batch(model)
    sequence = sequence_of([1] * 600, list(range(64)))

    def decode(n: int) -> set[int]:
        views = set()
        for _ in range(n):
            batch.fill([Span(sequence, len(sequence.tokens) - 1, 1)])
            views |= {id(view) for view in batch.views}
            sequence.tokens.append(1)
        return views

    first = decode(30)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    assert decode(8) <= first  # up to position 637 of the segment that ends at 639
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = [
        each
        for each in after.compare_to(before, "filename")
        if "batch.py" in each.traceback[0].filename and "test_" not in each.traceback[0].filename
    ]
    assert sum(each.size_diff for each in grown) < 256


def test_a_replayed_batch_comes_in_few_shapes() -> None:
    """Whatever its sequences are, but for the power of two that its work items have."""
    sizes = {"block_tokens": 4, "segment_tokens": 8, "buckets": (1, 2, 4), "is_replayed": True}
    batch = Batch(FakeModel(**sizes))
    one, two = sequence_of(list(range(10, 34)), [7, 3, 9, 4, 8, 6]), sequence_of([30, 31], [5])
    three = sequence_of([40], [1])
    batch.fill([Span(one, 23, 1), Span(two, 1, 1), Span(three, 0, 1)])
    # 3 + 1 + 1 items of work
    shapes = [(4,), (4,), (4,), (4, 4), (8, 4), (4, 24), (4,)]
    assert [view.shape for view in batch.views] == shapes
    tiles, work, out_rows = (batch.views[i] for i in (3, 4, 6))
    assert tiles.tolist() == [[0, 1, 0, 3], [1, 1, 3, 1], [2, 1, 4, 1], [3, 0, 0, 0]]
    assert work[:5].tolist() == batch.work.tolist()
    assert not work[5:].any(), "items of no rows"
    assert out_rows.tolist() == [0, 1, 2, 3]
    assert batch.out_rows.tolist() == [0, 1, 2]
    del one.tokens[8:]
    batch.fill([Span(one, 7, 1), Span(two, 1, 1), Span(three, 0, 1)])
    assert [view.shape for view in batch.views] == [*shapes[:4], (4, 4), *shapes[5:]]
    assert batch.work[:, 1].tolist() == [1, 1, 1]
    assert batch.views[4][3].tolist() == [0, 0, 0, 0], "what stood there before"


def test_padded_work_stays_within_what_the_compiler_planned_for() -> None:
    batch = Batch(FakeModel(block_tokens=4, segment_tokens=8, max_context=24, is_replayed=True))
    batch.fill([Span(sequence_of(list(range(24)), [7, 3, 9, 4, 8, 6]), 23, 1)])
    assert batch.views[4].shape == (3, 4)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60), st.booleans()), max_size=12),
    st.booleans(),
)
@settings(max_examples=40)
def test_what_changed_is_all_that_a_copy_needs(
    steps: list[tuple[int, int, bool]], is_replayed: bool
) -> None:
    """A copy of the memory that is told of each step's changes holds what the step reads."""
    batch = Batch(FakeModel(windows=(0, 8), max_chunk=64, is_replayed=is_replayed))
    copy = batch.memory.copy()
    base = batch.memory.ctypes.data
    sequences = [sequence_of([], list(range(24 * n, 24 * n + 24))) for n in range(4)]
    for sequence in sequences:
        sequence.blocks.append(sequence.blocks[0])
    for n, position, is_prompt in steps:
        for sequence in sequences[:n]:
            sequence.tokens = [position] * (position + 1)
        start, count = (position // 2, position - position // 2 + 1) if is_prompt else (position, 1)
        spans = [Span(sequence, start, count) for sequence in sequences[: min(n, 64 // count)]]
        batch.fill(spans)
        for first, end in batch.changed():
            copy[first:end] = batch.memory[first:end]
        for view in batch.views:
            start = view.ctypes.data - base
            assert copy[start : start + view.nbytes].tobytes() == view.tobytes()


def test_tokens_that_are_known_are_no_change() -> None:
    batch = Batch(FakeModel())
    batch.fill([Span(sequence := sequence_of([1, 2, 3], [0]), 2, 1)])
    list(batch.changed())
    sequence.tokens.append(4)
    batch.fill([Span(sequence, 3, 1)])
    ((start, end),) = batch.changed(tokens=False)
    base = batch.memory.ctypes.data
    assert batch.tokens.ctypes.data - base < start == batch.positions.ctypes.data - base < end


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 8))
def test_halves_of_the_tiles_cost_about_the_same(n: int, before: int, rows: int) -> None:
    tiles = [(i * rows, rows, 0, before + (i + 1) * rows - 1) for i in range(n)]
    ordered = balanced(tiles)
    assert sorted(ordered) == tiles
    middle = -(-n // 2)
    costs = [rows * (last + 1) for _, _, _, last in ordered]
    difference = abs(sum(costs[:middle]) - sum(costs[middle:]))
    assert difference <= max(costs), "one tile more or less is all that may differ"


@pytest.mark.parametrize("n_threads", [2, 4])
def test_threads_share_a_long_prompt_evenly(n_threads: int) -> None:
    ordered = balanced([(i * 8, 8, 0, i * 8 + 7) for i in range(64)])
    parts = np.array_split([tile[3] for tile in ordered], n_threads)
    costs = [int(part.sum()) for part in parts]
    assert max(costs) <= 1.05 * min(costs)
