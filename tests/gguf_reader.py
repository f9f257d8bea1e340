"""A GGUF file as the `gguf` package reads it, sooner."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


class Reader(gguf.GGUFReader):
    """`data` is a plain array over the mapped file: a slice of np.memmap takes three times as long,
    and a vocabulary of 262,144 tokens a million of them."""

    @property
    def data(self) -> NDArray[Any]:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[Any]) -> None:
        self._data = np.asarray(mapped)
