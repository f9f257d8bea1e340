"""What a board allows at most, measured there: reading memory, and multiplying bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xpuc.bench.roofs import Roofs
from xpuc.tuning.kernels import Board, Call, Direct
from xpuc.tuning.timing import Times


@dataclass(frozen=True)
class Loop:
    """A kernel that measures a limit: any int32 (elements,) -> int32 of shape `result`.

    A call of it reads so many bytes or makes so many operations; the first of a target's reads
    memory.
    """

    function: str
    elements: int
    result: tuple[int, ...]
    n_bytes: int = 0
    operations: int = 0


class RoofKernels:
    """The kernels on a board, to be timed in turns with others: conditions change by the second."""

    def __init__(self, board: Board, library: Path, loops: Sequence[Loop]) -> None:
        module = board.load(library)
        self._loops = loops
        self.kernels = [
            Direct(
                board, module,
                Call(
                    loop.function,
                    tuple(
                        board.empty(shape, "int32") for shape in ((loop.elements,), loop.result)
                    ),
                ),
            )
            for loop in loops
        ]  # fmt: skip

    def roofs(self, times: Sequence[Times]) -> Roofs:
        """From the times of `kernels`."""
        amounts = [(loop.n_bytes or loop.operations) / t.median
                   for loop, t in zip(self._loops, times, strict=True)]  # fmt: skip
        return Roofs(*amounts)
