"""Stop strings in a stream of text: found across tokens, held back only while one may be coming."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text piece by piece; `matched` is the stop string once one has been found.

    However the text is cut into pieces, the stop string found is the one that is complete first;
    of two complete at the same character, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now: all but what could still become a stop string."""
        if not self._stops:
            return text
        text = self._held + text
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        n_held = max(_n_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What was held back, once nothing can follow."""
        held, self._held = self._held, ""
        return held


def _n_begun(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
