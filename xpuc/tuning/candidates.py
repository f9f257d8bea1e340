"""What is measured of a task: the kernels of a schedule with some knobs, and how to call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Tensor:
    """An argument: one of the task's own (`operand` i, `plane` i counted over all weights), or new:
    zeros before the first call.

    `shape` has a symbol's name where it is known only with the number of rows.
    """

    role: str  # operand | plane | new
    index: int
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Call:
    """A kernel of the library and its arguments, as indices into the program's tensors."""

    function: str
    args: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The calls of a candidate in order, and which tensors are the result."""

    calls: tuple[Call, ...]
    tensors: tuple[Tensor, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A task's schedule with knobs: its digest, and its library once it is built.

    `refused` says why it does not build; `is_default`: its knobs are those of an untuned build.
    """

    knobs: Mapping[str, int]
    kernel: str
    program: Program | None = None
    library: Path | None = None
    refused: str = ""
    is_default: bool = False

    def at(self, library: Path) -> Candidate:
        """The same with its library there."""
        return replace(self, library=library)
