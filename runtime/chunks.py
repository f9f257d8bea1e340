"""How many tokens of waiting prompts a step takes, so that streams do not stall behind them."""

from __future__ import annotations

import math

from xpuc.runtime.cost_model import CostModel, Work

BUDGET_MS = 150.0
MIN_CHUNK, MAX_CHUNK = 32, 512
_GOOD_ENOUGH = 0.97  # of the best rate: a smaller chunk keeps a newcomer waiting less
_RETRY_STEPS = 64  # after which a size that is not used is measured again


class ChunkPolicy:
    """While nothing decodes, the smallest size that reads as fast as any, learned by trying each;
    otherwise the largest whose step is predicted to fit `budget_ms`.

    max_chunk  at most this many tokens; the least chunk is MIN_CHUNK, or this if it is less. Only
               the budget goes below it, down to 1, because a prompt must end; that is counted
               (StepRecord.n_small)
    budget_ms  math.inf: no budget, whatever decodes waits for the whole chunk
    """

    def __init__(self, max_chunk: int = MAX_CHUNK, *, budget_ms: float = BUDGET_MS) -> None:
        assert max_chunk > 0, max_chunk
        self.cost = CostModel()
        self.max_chunk = min(max_chunk, MAX_CHUNK)
        self.min_chunk = min(max_chunk, MIN_CHUNK)
        self.budget_ms = budget_ms
        sizes = {self.max_chunk}
        size = self.min_chunk
        while size < self.max_chunk:
            sizes.add(size)
            size *= 2
        self.sizes = tuple(sorted(sizes))

    def size(self, decoding: Work, n_behind: int, room: int, start: int, spent_ns: int = 0) -> int:
        """Tokens for the prompts of a step that has the work `decoding` as well.

        n_behind  tokens the prompts are behind by
        room      rows the step has left
        start     where the first of them goes on
        spent_ns  of the budget, on deciding who runs
        """
        most = min(n_behind, room, self.max_chunk)
        if most <= 1:
            return most
        if decoding.decode_rows:
            return self._within(self.budget_ms * 1e6 - spent_ns, decoding, most, start)
        return min(most, self._fastest(n_behind, most, start))

    def _fastest(self, n_behind: int, most: int, start: int) -> int:
        """Sizes are tried on long prompts, where a poor one costs little; a short one is read as
        it is until something is known about its size."""
        cost = self.cost
        seen = [size for size in self.sizes if cost.n_seen(size)]
        if n_behind >= 2 * self.max_chunk:
            if len(seen) < len(self.sizes):
                return max(set(self.sizes) - set(seen))
            oldest = min(seen, key=cost.last_seen)
            if cost.n_steps - cost.last_seen(oldest) >= _RETRY_STEPS:
                return oldest
        if not seen or not cost.n_seen(most):
            return most
        times = [max(cost.predict(Work().with_chunk(size, start)), 1.0) for size in seen]
        rates = [size / time for size, time in zip(seen, times, strict=True)]
        best = max(rates)
        return next(s for s, rate in zip(seen, rates, strict=True) if rate >= _GOOD_ENOUGH * best)

    def _within(self, ns: float, decoding: Work, room: int, start: int) -> int:
        if math.isinf(ns):
            return room
        # What was never measured is approached by doubling.
        room = min(room, max(self.min_chunk, 4 * self.cost.largest_seen() - 1))
        return self.cost.fitting(ns, decoding, start, room) or 1
