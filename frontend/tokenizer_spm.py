"""The llama tokenizer (SentencePiece BPE): merge ranks from token scores.

SentencePiece knows no merge list. It joins, again and again, the two neighbours whose concatenation
is the best-scored token (the leftmost on ties). `tokenizers` wants (left, right) pairs in order of
rank. Each token arises in one way only: while a span becomes one token nothing outside can touch
it, so its joins happen in the order they would happen were the span alone. The last of those joins
is the token's only merge, and the merges sorted by score give the same tokens. Taking every split
of every token instead, as is common, doubles the file and the time to load it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

SPACE = "\u2581"
_NO_TOKEN = float("-inf")


def merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], matched_first: frozenset[int]
) -> list[tuple[str, str]]:
    """(left, right) of every token that joins can reach, best score first.

    `matched_first`: ids that are cut out of the text before any joining.
    """
    score_of = dict(zip(tokens, scores, strict=True))
    found = []
    for index, token in enumerate(tokens):
        # A token cut out beforehand can still arise where its U+2581 was a space in the text.
        if len(token) < 2 or (index in matched_first and SPACE not in token):
            continue
        cut = _last_join(token, score_of)
        left, right = token[:cut], token[cut:]
        if left in score_of and right in score_of:
            # Among equals the longer first: the leftmost join wins, so a run of one character
            # grows from the left instead of pairing up.
            found.append((-scores[index], -len(token), index, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _last_join(token: str, score_of: Mapping[str, float]) -> int:
    """Where in `token` its last join lies; 0 if joining stops short of it."""
    parts = list(token)
    joined = [score_of.get(left + right, _NO_TOKEN) for left, right in pairwise(parts)]
    while len(joined) > 1:
        best = max(joined)
        if best == _NO_TOKEN:
            return 0
        at = joined.index(best)
        parts[at] += parts.pop(at + 1)
        del joined[at]
        if at < len(joined):
            joined[at] = score_of.get(parts[at] + parts[at + 1], _NO_TOKEN)
        if at:
            joined[at - 1] = score_of.get(parts[at - 1] + parts[at], _NO_TOKEN)
    return len(parts[0])
