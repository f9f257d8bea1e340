"""Memory that is used again for every token, so that a token makes no arrays."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from xpuc.runtime.kv_pool import pages

FEW = 256  # entries up to which the leading parts of a scratch are made with it


class Scratch:
    """Room for `n` numbers, and its leading parts.

    Much of it is in pages of its own, as logits are: where two places differ by a few bytes modulo
    a page, some machines copy one to the other twenty times as slowly.
    """

    def __init__(self, n: int, dtype: str) -> None:
        self.all: npt.NDArray[Any] = pages((n,), dtype) if n > FEW else np.empty(n, dtype)
        self._numbers = self.all.data
        self._parts = [self.all[:each] for each in range(min(n, FEW) + 1)]

    def __getitem__(self, n: int) -> npt.NDArray[Any]:
        """The first `n` entries; a new view if these are more than FEW and not all."""
        if n < len(self._parts):
            return self._parts[n]
        return self.all if n == len(self.all) else self.all[:n]

    def holding(self, values: Collection[float]) -> npt.NDArray[Any]:
        """These values: if there are no more than FEW in its first entries."""
        if len(values) > FEW:
            return np.fromiter(values, self.all.dtype, len(values))
        numbers = array(self._numbers.format, values)
        self._numbers[: len(numbers)] = numbers
        return self[len(numbers)]


def float32(number: float) -> float:
    """The nearest float32."""
    return array("f", (number,))[0]
