"""Machine code of NVIDIA GPUs, read with NVIDIA's own disassembler: what a kernel executes."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from xpuc.codegen.cuda.wheels import wheel_folder
from xpuc.errors import XpucError

_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE
)
_NOTHING = ("NOP", "BRA", "EXIT")
INSTALL = "pip install 'xpuc[cuda,tune]'"
_ALL = (0, 1 << 62)  # addresses


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, its opcode with modifiers, where it jumps if it does."""

    address: int
    opcode: str
    target: int | None

    def is_a(self, opcode: str) -> bool:
        """Whether it is of an opcode and the modifiers named, whatever follows them."""
        return f"{self.opcode}.".startswith(f"{opcode}.")


@dataclass(frozen=True)
class Sass:
    """The instructions of one kernel on one architecture, in order."""

    kernel: str
    instructions: tuple[Instruction, ...]

    def histogram(self) -> Counter[str]:
        """How often each opcode with its modifiers stands in the code."""
        return Counter(i.opcode for i in self.instructions)

    def count(self, opcode: str) -> int:
        """Instructions of an opcode and the modifiers named, whatever follows them."""
        return sum(i.is_a(opcode) for i in self.instructions)

    def hot_loop(self, opcode: str | None = None) -> tuple[Instruction, ...]:
        """The longest loop that holds no other, all of the code if there is none.

        With an `opcode`, of the loops that have it.
        """
        return self._within(self._hot_span(opcode))

    def around_the_hot_loop(self) -> tuple[Instruction, ...]:
        """The shortest loop that holds the hot one and more, all of the code if there is none."""
        first, last = self._hot_span()
        around = [s for s in self._loops() if s[0] <= first and last < s[1]]
        return self._within(min(around, key=lambda s: s[1] - s[0], default=_ALL))

    def _hot_span(self, opcode: str | None = None) -> tuple[int, int]:
        spans = [
            span for span in self._loops()
            if opcode is None or any(i.is_a(opcode) for i in self._within(span))
        ]  # fmt: skip
        inner = [
            s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)
        ]
        return max(inner, key=lambda s: s[1] - s[0], default=_ALL)

    def _loops(self) -> list[tuple[int, int]]:
        """First and last address of each."""
        jumps = [i for i in self.instructions if i.target is not None and i.target < i.address]
        return [(int(j.target or 0), j.address) for j in jumps]

    def _within(self, span: tuple[int, int]) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if span[0] <= i.address <= span[1])

    def loaded_bytes(self) -> int:
        """Bytes a thread asks global memory for in one pass of the hot loop."""
        loads = ("LDG.", "LDGSTS.")
        return sum(_width(i.opcode) for i in self.hot_loop() if i.opcode.startswith(loads))

    def instructions_per_weight(self, weights: int, opcode: str | None = None) -> float:
        """Of the hot loop, in one pass of which a thread takes that many weights."""
        return sum(i.opcode not in _NOTHING for i in self.hot_loop(opcode)) / weights


def _width(load: str) -> int:
    """Bytes of a load by its modifiers: LDG.E.128."""
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[m] for m in load.split(".") if m in widths), 4)


def is_installed() -> bool:
    """Whether there is a disassembler."""
    return _tools() is not None


def disassemble(fatbin: bytes, arch: str) -> dict[str, Sass]:
    """The kernels of a fatbin by name, as they are for an architecture (sm_90a).

    XpucError if the disassembler is not installed.
    """
    tools = _tools()
    if tools is None:
        raise XpucError("NVIDIA's disassembler is not installed", INSTALL)
    with tempfile.TemporaryDirectory(prefix="xpuc-") as scratch:
        path = Path(scratch) / "kernels.fatbin"
        path.write_bytes(fatbin)
        done = subprocess.run(
            [tools / "cuobjdump", "-sass", "-arch", arch, path],
            capture_output=True, text=True, check=False,
            env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
        )  # fmt: skip
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise XpucError(f"cuobjdump cannot read the device code ({said})", f"reinstall: {INSTALL}")
    _, *parts = _FUNCTION.split(done.stdout)
    return {
        name: Sass(name, tuple(_instructions(text)))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _tools() -> Path | None:
    """The folder of cuobjdump, which finds nvdisasm on the path."""
    folder = wheel_folder()
    return folder / "bin" if folder and (folder / "bin" / "cuobjdump").is_file() else None


def _instructions(text: str) -> list[Instruction]:
    found = []
    for m in _INSTRUCTION.finditer(text):
        jump = re.search(r"0x([0-9a-f]+)", m[3]) if m[2] == "BRA" else None
        found.append(Instruction(int(m[1], 16), m[2], int(jump[1], 16) if jump else None))
    return found
