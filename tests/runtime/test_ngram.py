"""What followed earlier in a text: against a search through it, and how much is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpuc.runtime.ngram import Lookup, NgramIndex

texts = st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 9), max_size=60)


def searched(text: Many[int], ngram_min: int, ngram_max: int, n_tokens: int) -> list[int]:
    """The longest end of the text first, and of that the latest place with something after it."""
    for n in range(ngram_max, ngram_min - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                grown = list(text)
                for place in range(start + n, start + n + n_tokens):
                    grown.append(grown[place])
                return grown[len(text) :]
    return []


@given(texts, st.integers(1, 4), st.integers(0, 3), st.integers(1, 8), st.data())
def test_it_finds_what_a_search_finds(
    text: list[int], ngram_min: int, more: int, n_tokens: int, data: st.DataObject
) -> None:
    index, n = NgramIndex(ngram_min, ngram_min + more), 0
    while n < len(text):
        n += data.draw(st.integers(1, 9))
        part = text[:n]
        found = index.continuation(part, n_tokens)
        assert found == searched(part, ngram_min, ngram_min + more, n_tokens)


def test_the_longest_end_counts_and_of_that_the_latest_place() -> None:
    text = [1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3]
    assert NgramIndex(2, 3).continuation(text, 3) == [7, 8, 2]
    assert NgramIndex(2, 2).continuation(text, 3) == [9, 1, 2]
    assert NgramIndex(4, 4).continuation(text, 3) == []


def test_a_text_that_repeats_goes_on_to_repeat() -> None:
    assert NgramIndex(2, 4).continuation([5, 6, 7, 5, 6], 7) == [7, 5, 6, 7, 5, 6, 7]
    assert NgramIndex(1, 4).continuation([3, 3], 4) == [3, 3, 3, 3]


class Watched(list[int]):
    """Counts the tokens that are read from it."""

    n_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.n_read += len(found) if isinstance(place, slice) else 1
        return found


def test_a_step_reads_a_few_tokens_however_long_the_text_is() -> None:
    index, text = NgramIndex(2, 4), Watched([1, 2, 3] * 500)
    index.continuation(text, 7)
    for token in [1, 2, 3] * 5:
        text.append(token)
        text.n_read = 0
        assert len(index.continuation(text, 7)) == 7
        assert text.n_read <= 2 * (2 + 3 + 4) + 7


def lengths(lookup: Lookup, share: float, n_steps: int) -> list[int]:
    """Of the drafts on a text that always repeats, of each of which a share is right."""
    found = []
    for _ in range(n_steps):
        n = len(lookup.propose([4] * 10, 20))
        if n:
            lookup.learn(n, int(share * n))
        found.append(n)
    return found


def test_drafts_grow_while_all_of_them_is_right() -> None:
    assert lengths(Lookup(2, 4), 1.0, 6) == [1, 3, 7, 15, 20, 20]


def test_drafts_shrink_when_less_than_half_is_right_and_stay_at_half() -> None:
    lookup = Lookup(2, 4)
    lengths(lookup, 1.0, 3)
    assert lengths(lookup, 0.6, 3) == [15, 15, 15]
    assert lengths(lookup, 0.4, 3) == [15, 7, 3]


def test_pauses_double_while_nothing_is_right_and_end_when_something_is() -> None:
    lookup = Lookup(2, 4)
    found = lengths(lookup, 0.0, 200)
    places = [place for place, n in enumerate(found) if n]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert gaps == [2, 3, 5, 9, 17, 33, 33, 33, 33]
    while not lookup.propose([4] * 10, 20):
        pass
    lookup.learn(1, 1)
    assert lengths(lookup, 0.0, 3) == [3, 0, 1]


def test_a_draft_that_was_cut_is_judged_by_what_is_left() -> None:
    lookup = Lookup(2, 4)
    lengths(lookup, 1.0, 3)
    assert len(lookup.propose([4] * 10, 20)) == 15
    lookup.learn(2, 2)
    assert len(lookup.propose([4] * 10, 20)) == 15, "two of two says nothing about fifteen"


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_comes_of_a_text_without_repetition(text: list[int]) -> None:
    assert Lookup(1, 3).propose(text, 5) == []
