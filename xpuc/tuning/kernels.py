"""Kernels on a board: their arguments in place, their results, their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xpuc.tuning.candidates import Program
from xpuc.tuning.inputs import Case

Timer = Callable[[int], list[float]]  # seconds of each of so many runs


class BoardLost(Exception):
    """The connection to a board broke: the board went away, or a kernel crashed it."""


@dataclass(frozen=True)
class Call:
    """A function of a library on a board, and its tensors there."""

    function: str
    args: tuple[Any, ...]


class Board(Protocol):
    """Where kernels run. Its methods raise BoardLost when it breaks."""

    def load(self, library: Path) -> Any:
        """A library, opened there."""

    def tensor(self, array: NDArray[Any]) -> Any:
        """A copy of an array there."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A tensor there that holds anything, in memory of its own."""

    def array(self, tensor: Any) -> NDArray[Any]:
        """The contents of a tensor there."""

    def timer(self, module: Any, calls: Sequence[Call]) -> Timer:
        """What times the calls of a library, one after the other, each run from cold caches."""


class Direct:
    """Calls of a library's functions, one after the other."""

    def __init__(self, board: Board, module: Any, *calls: Call) -> None:
        self.board = board
        self._module, self._calls = module, calls
        self._timer = board.timer(module, calls)

    def run(self) -> None:
        """Make the calls once."""

        def run() -> None:
            for call in self._calls:
                self._module[call.function](*call.args)

        lost(run)

    def seconds(self, repeat: int) -> list[float]:
        """Seconds of `repeat` runs, each from cold caches."""
        return self._timer(repeat)


class Kernel(Direct):
    """A candidate's program with its arguments in place; `own` are the tensors of its task."""

    def __init__(self, board: Board, module: Any, program: Program, own: Arguments) -> None:
        tensors = [
            own.tensor(t.role, t.index) or board.tensor(own.empty(t.shape, t.dtype))
            for t in program.tensors
        ]
        calls = (Call(c.function, tuple(tensors[i] for i in c.args)) for c in program.calls)
        super().__init__(board, module, *calls)
        self._results = [tensors[i] for i in program.results]

    def results(self) -> list[NDArray[Any]]:
        """The result tensors, computed once."""
        self.run()
        return [self.board.array(t) for t in self._results]


class Arguments:
    """A case's arrays on a board, shared by all candidates of the task."""

    def __init__(self, board: Board, case: Case) -> None:
        self._symbols = case.symbols
        planes = [plane for weight in case.planes for plane in weight]
        self._tensors = {
            "operand": [board.tensor(a) for a in case.operands],
            "plane": [board.tensor(a) for a in planes],
        }

    def tensor(self, role: str, index: int) -> Any | None:
        return self._tensors[role][index] if role in self._tensors else None

    def empty(self, shape: Sequence[int | str], dtype: str) -> NDArray[Any]:
        """Room for a new tensor, zeros at first."""
        sizes = [d if isinstance(d, int) else self._symbols[d] for d in shape]
        return np.zeros(sizes, dtype)


def lost(step: Callable[[], Any]) -> Any:
    """Run a step on a board; BoardLost if the connection breaks in it."""
    try:
        return step()
    except (OSError, RuntimeError, AttributeError, AssertionError) as error:
        raise BoardLost(str(error).splitlines()[-1] if str(error) else repr(error)) from None
