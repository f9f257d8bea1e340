"""What ptxas says a kernel takes: the report of `-v`, as rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelUsage:
    """What one kernel takes on one architecture.

    Registers and stack are those of a thread, shared memory that of a block, as declared in the
    kernel; spills are bytes of the instructions that move registers to and from the stack.
    """

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_BARRIERS = re.compile(r"used (\d+) barriers")


def parse(log: str) -> tuple[KernelUsage, ...]:
    """The rows of a log, in its order; what is not of ptxas is passed over.

    Functions a kernel calls have lines of their own after its: their spills are added to its, and
    the deepest stack counts.
    """
    return tuple(_row(part) for part in re.split("(?=Compiling entry function)", log)[1:])


def _row(said: str) -> KernelUsage:
    [(kernel, arch)] = _ENTRY.findall(said)
    stacks = [tuple(map(int, m.groups())) for m in _STACK.finditer(said)]
    return KernelUsage(
        kernel=kernel,
        arch=arch,
        registers=max(_numbers(_REGISTERS, said)),
        shared_bytes=max(_numbers(_SHARED, said), default=0),
        stack_bytes=max(s[0] for s in stacks),
        spill_store_bytes=sum(s[1] for s in stacks),
        spill_load_bytes=sum(s[2] for s in stacks),
        barriers=max(_numbers(_BARRIERS, said), default=0),
    )


def _numbers(pattern: re.Pattern[str], text: str) -> Iterable[int]:
    return (int(m[1]) for m in pattern.finditer(text))
