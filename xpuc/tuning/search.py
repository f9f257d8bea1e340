"""Which knobs to try next: one knob at a time from the best so far, until none helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from xpuc.schedules import Space

Knobs = Mapping[str, int]
_ROUNDS = 3


class Search:
    """Coordinate descent over a space of knobs.

    Spaces are small and their knobs nearly independent: a few dozen trials find what a full grid
    of hundreds does. `told` are gains over the incumbent known before (of a session that goes on).
    """

    def __init__(self, space: Space, start: Knobs) -> None:
        self._space, self.best = space, dict(start)
        self._gains: dict[tuple[tuple[str, int], ...], float] = {_frozen(start): 1.0}

    def tell(self, knobs: Knobs, gain: float) -> None:
        """How many times as fast as the incumbent these knobs are; 0 if they do not work."""
        self._gains[_frozen(knobs)] = gain
        if gain > self._gains[_frozen(self.best)]:
            self.best = dict(knobs)

    @property
    def gain(self) -> float:
        """That of the best so far."""
        return self._gains[_frozen(self.best)]

    def batches(self) -> Iterator[list[Knobs]]:
        """Knobs to measure, several at a time; their gains are told before the next are asked for.

        A batch leaves out what is known already.
        """
        for _ in range(_ROUNDS):
            before = dict(self.best)
            for name, values in self._space.items():
                batch = [self.best | {name: value} for value in values]
                new = [knobs for knobs in batch if _frozen(knobs) not in self._gains]
                if new:
                    yield list(new)
            if self.best == before:
                return


def _frozen(knobs: Knobs) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(knobs.items()))
