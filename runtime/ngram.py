"""Prompt lookup: what comes next in a text is guessed from what came next earlier in it."""

from __future__ import annotations

from collections.abc import Sequence as Many

_MAX_PAUSE = 32  # steps


class NgramIndex:
    """Where each n-gram of a growing text was last, for ngram_min <= n <= ngram_max.

    Kept incrementally: a token is looked at once, in a dict a length.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        assert 1 <= ngram_min <= ngram_max, (ngram_min, ngram_max)
        # The place after an n-gram's latest occurrence, longest n first.
        self._after: dict[int, dict[tuple[int, ...], int]] = {
            n: {} for n in range(ngram_max, ngram_min - 1, -1)
        }
        self._end = 1  # n-grams that end before it are known

    def continuation(self, tokens: Many[int], n_tokens: int) -> list[int]:
        """`n_tokens` that followed the latest earlier occurrence of the longest last n-gram which
        occurred before; none if none did.

        `tokens` are those of the last call and any number more. What followed may run into the
        end of the text: then it goes on with itself, as a text that repeats does.
        """
        self._extend(tokens)
        for n, after in self._after.items():
            start = after.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                found = list(tokens[start : start + n_tokens])
                period = len(tokens) - start
                for place in range(len(found), n_tokens):
                    found.append(found[place - period])
                return found
        return []

    def _extend(self, tokens: Many[int]) -> None:
        """Know the n-grams that something follows: all but those at the end."""
        for end in range(self._end, len(tokens)):
            for n, after in self._after.items():
                if n <= end:
                    after[tuple(tokens[end - n : end])] = end
        self._end = max(self._end, len(tokens))


class Lookup:
    """Drafts for one sequence, as long as they have been worth it.

    The length starts at 1, goes to twice and one more when a whole draft was right, and to half
    when less than half of it was: 1, 3, 7, the rows of decode calls less one. After a draft of
    which nothing was right the next decode step brings none, then the next two, four, ... up to
    `_MAX_PAUSE`, until something is right again.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._index = NgramIndex(ngram_min, ngram_max)
        self._length = 1
        self._pause = 0  # steps, after the next draft that is all wrong
        self._n_paused = 0  # steps that are left without a draft

    def propose(self, tokens: Many[int], most: int) -> list[int]:
        """A draft of at most so many tokens to follow `tokens`; asked once a decode step."""
        if self._n_paused:
            self._n_paused -= 1
            return []
        return self._index.continuation(tokens, min(self._length, most))

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        """Of the last draft, cut to `n_drafted` tokens, so many were right."""
        if n_accepted == n_drafted:
            self._length = max(self._length, 2 * n_drafted + 1)
        elif 2 * n_accepted < n_drafted:
            self._length = max(1, n_drafted // 2)
        if n_accepted:
            self._pause = 0
        else:
            self._n_paused = self._pause = min(max(1, 2 * self._pause), _MAX_PAUSE)
