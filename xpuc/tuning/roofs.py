"""What a board allows at most, measured there: reading memory, and multiplying bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xpuc.bench.roofs import Roofs
from xpuc.codegen.target import CompileTarget
from xpuc.schedules.llvm import peak
from xpuc.schedules.llvm.isa import isa_for
from xpuc.schedules.llvm.read import LANES, memory_read
from xpuc.tuning.boards import Board, Call, Direct
from xpuc.tuning.programs import compile_library
from xpuc.tuning.timing import Times

_READ_BYTES, _PARTS = 96 << 20, 256


def build(machine: CompileTarget, folder: Path) -> Path:
    """The library of the kernels that measure the roofs."""
    path = folder / "roofs.so"
    kernels = [memory_read(_READ_BYTES, _PARTS), peak.int8_peak(isa_for(machine.facts.features))]
    present = [kernel for kernel in kernels if kernel is not None]
    compile_library(present, machine.facts.kind, machine.facts.cpu, path)
    return path


class RoofKernels:
    """The kernels on a board, to be timed in turns with others: conditions change by the second."""

    def __init__(self, board: Board, library: Path, machine: CompileTarget) -> None:
        module = board.load(library)
        memory = board.tensor(np.ones(_READ_BYTES // 4, np.int32))
        sums = board.tensor(np.zeros(_PARTS * LANES, np.int32))
        self.kernels = [Direct(board, module, Call("memory_read", (memory, sums)))]
        self._operations = peak.operations(isa_for(machine.facts.features))
        if self._operations:
            x = board.tensor(np.arange(LANES, dtype=np.int32))
            out = board.tensor(np.zeros((peak.CHUNKS, LANES), np.int32))
            self.kernels.append(Direct(board, module, Call(peak.NAME, (x, out))))

    def roofs(self, times: Sequence[Times]) -> Roofs:
        """From the times of `kernels`."""
        read, *peaks = times
        return Roofs(
            _READ_BYTES / read.median,
            self._operations / peaks[0].median if peaks else None,
        )
