"""The recorder of rows finds what differs, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import FakeModel, engine_of
from row_bits import OPTIONS, Recorder, Row, Rows, Seen, check_same, rows_by_text, text_digest

from xpuc.runtime.engine import Engine

GREEDY = OPTIONS | {"temperature": 0, "max_tokens": 12}
PROMPTS = [[3] * 20, [4] * 21, [5] * 9, [*[3] * 20, 7, 8]]


def alone() -> Rows:
    recorder = Recorder(engine_of())
    for prompt in PROMPTS:
        recorder.engine.generate(prompt, **GREEDY)
    return rows_by_text(recorder.seen)


def test_rows_are_found_again_by_their_texts() -> None:
    recorder = Recorder(engine_of(n_blocks=12, max_chunk=7))
    answers = recorder.engine.generate(PROMPTS, **GREEDY)
    assert len(recorder.seen) == check_same(alone(), recorder.seen) == 12 * len(PROMPTS)
    assert recorder.preempted
    assert len(recorder.resumed) >= len(recorder.preempted)
    assert recorder.kinds["mixed"] > 0
    assert max(recorder.chunks) <= 7
    texts = [[*p, *a.ids[:n]] for p, a in zip(PROMPTS, answers, strict=True) for n in range(12)]
    assert {text_digest(text) for text in texts} == {each.text for each in recorder.seen}


def test_k_v_of_another_text_is_noticed() -> None:
    expected = alone()
    model = FakeModel()
    recorder = Recorder(Engine(model))
    prompt = PROMPTS[0]
    recorder.engine.generate(prompt, **GREEDY)
    assert check_same(expected, recorder.seen) == 12
    pool = recorder.engine.kv.groups[0].pool
    block = pool.find(pool.chain(prompt)[-1])
    tokens = model.kv[0].buffers(block)[0].view(np.int64)
    assert tokens.tolist() == [3] * 4
    tokens[1] = 4
    recorder.seen.clear()
    recorder.engine.generate(prompt, **GREEDY)
    with pytest.raises(AssertionError, match="the row after 20 tokens of sequence"):
        check_same(expected, recorder.seen)


@pytest.mark.parametrize(("margin", "is_same"), [(0.049, True), (0.05, False)])
def test_without_bits_the_likeliest_counts_where_it_is_sure(margin: float, is_same: bool) -> None:
    expected = {"a text": Row("bits", 5, margin), "another": Row("bits", 6, 9.0)}
    close = [Seen(0, 9, "another", Row("other bits", 6, 8.0)), Seen(0, 9, "a third", Row("", 1, 9))]
    assert check_same(expected, close, bits=False) == 1
    with pytest.raises(AssertionError, match="differs"):
        check_same(expected, close)
    other = [Seen(1, 9, "a text", Row("other bits", 7, 1.0))]
    if is_same:
        assert check_same(expected, other, bits=False) == 1
    else:
        with pytest.raises(AssertionError, match="after 9 tokens of sequence 1 differs"):
            check_same(expected, other, bits=False)


def test_two_rows_of_one_text_are_alike() -> None:
    seen = [Seen(n, 9, "a text", Row("bits", 5, 1.0)) for n in range(2)]
    assert rows_by_text(seen) == {"a text": seen[0].row}
    with pytest.raises(AssertionError, match="two rows for one text"):
        rows_by_text([*seen, Seen(2, 9, "a text", Row("other bits", 5, 1.0))])
