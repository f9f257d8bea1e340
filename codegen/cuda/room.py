"""Registers before occupancy: a kernel that spills is given room at the cost of resident blocks.

ptxas keeps one more block resident where that costs a few bytes of spills, which are loads and
stores in a hot loop. Such a kernel asks for a block less (`__launch_bounds__(threads, blocks)`),
again until nothing spills.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from xpuc.codegen.cuda.kernel_text import KERNEL, without_others
from xpuc.codegen.cuda.ptxas import KernelUsage

Compile = Callable[[str], tuple[bytes, Sequence[KernelUsage]]]  # source -> code, what it takes

_REGISTERS = 65536  # of a multiprocessor, on every architecture
_THREADS = 2048  # resident there at most
_UNIT = 8  # registers of a thread are given out in multiples of it


def without_spills(compile: Compile, source: str) -> tuple[bytes, Sequence[KernelUsage]]:
    """What `compile` makes of CUDA source as TVM writes it, its spilling kernels given room.

    Those alone are compiled until they have it, then all of the source once more.
    """
    code, usage = compile(source)
    spilled = spilling(usage)
    if not spilled:
        return code, usage
    blocks: dict[str, int] = {}
    probed = {row.kernel: row for row in spilled}
    while probed:
        blocks |= {name: _fewer(source, row, blocks.get(name)) for name, row in probed.items()}
        _, rows = compile(with_blocks(without_others(source, probed), blocks))
        probed = {row.kernel: row for row in spilling(rows) if blocks[row.kernel] > 1}
    return compile(with_blocks(source, blocks))


def spilling(usage: Sequence[KernelUsage]) -> list[KernelUsage]:
    """The rows of kernels that spill."""
    return [row for row in usage if row.spill_store_bytes or row.spill_load_bytes]


def with_blocks(source: str, blocks: Mapping[str, int]) -> str:
    """The source in which these kernels ask for so many resident blocks."""

    def bounds(found: re.Match[str]) -> str:
        threads, _, name = found.groups()
        asked = f", {blocks[name]}" if name in blocks else ""
        return f'extern "C" __global__ void __launch_bounds__({threads}{asked}) {name}'

    return KERNEL.sub(bounds, source)


def _fewer(source: str, row: KernelUsage, blocks: int | None) -> int:
    """One less than `blocks`, or than registers and threads leave room for now."""
    if blocks is None:
        threads = next(int(f[1]) for f in KERNEL.finditer(source) if f[3] == row.kernel)
        registers = -(-row.registers // _UNIT) * _UNIT
        blocks = min(_REGISTERS // (registers * threads), _THREADS // threads)
    return max(1, blocks - 1)
