"""Prefix affinity in llama-server's numbers, for reports: which slot it would give a prompt.

Nothing here decides anything: blocks are shared by content (blocks.py), whoever computed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

MIN_SIMILARITY = 0.10  # strictly more of the prompt must match
MIN_KEEP = 0.5  # a slot that keeps less of its tokens has them saved first


@dataclass(frozen=True, slots=True)
class Slot:
    """Tokens one place of a server holds, when it was last used, and whether it is at work."""

    id: int
    tokens: Many[int]
    last_used: int
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """similarity: share of the prompt that the slot holds; keep: share of its tokens that stay.

    Both are None for a slot that was only the least recently used.
    """

    id: int
    similarity: float | None
    keep: float | None

    @property
    def saves_old(self) -> bool:
        """Whether what the slot held is worth saving before it is overwritten."""
        return self.keep is None or self.keep < MIN_KEEP


def common_prefix(a: Many[int], b: Many[int]) -> int:
    """How many tokens two texts begin with together."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def choose_slot(
    slots: Iterable[Slot], prompt: Many[int], min_similarity: float = MIN_SIMILARITY
) -> SlotChoice | None:
    """The idle slot that holds most of `prompt`, the first of equals; else the least recently used
    one, the last of equals; None if all are busy."""
    best: SlotChoice | None = None
    oldest: Slot | None = None
    most = min_similarity
    for slot in slots:
        if slot.is_busy:
            continue
        if oldest is None or slot.last_used <= oldest.last_used:
            oldest = slot
        n = common_prefix(slot.tokens, prompt)
        if n and n / len(prompt) > most:
            most = n / len(prompt)
            best = SlotChoice(slot.id, most, n / len(slot.tokens))
    if best is not None or oldest is None:
        return best
    return SlotChoice(oldest.id, None, None)
