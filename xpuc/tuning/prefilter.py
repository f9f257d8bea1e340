"""Candidates for a GPU judged without one: by what ptxas says of them, and by their machine code.

What has no chance is refused with a reason; the rest is put in the order of a model: a kernel takes
about the longer of reading its weights and issuing its instructions, and reads the faster the more
it has in flight. The model ranks; it does not say how long anything takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xpuc.bench.predict import GPUS, REACHED, Gpu
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.sass import Sass

LEAST_WARPS = 8  # resident on a multiprocessor, or a kernel waits for memory most of the time
MOST_INSTRUCTIONS = 1.5  # a product, in terms of the candidate that needs fewest
MOST_SHARED = 48 << 10  # bytes that a block is given without asking for more at launch
_LATENCY_S = 8e-7  # assumed: of memory under load
_HALF = 0.25  # assumed: in terms of bandwidth times latency, in flight where half of it is reached
_REGISTERS, _UNIT = 65536, 256  # of a multiprocessor; a warp is given whole units
_LIMITS = {  # resident warps, blocks and bytes of shared memory of a multiprocessor
    "sm_80": (64, 32, 164 << 10), "sm_86": (48, 16, 100 << 10), "sm_89": (48, 24, 100 << 10),
    "sm_90": (64, 32, 228 << 10), "sm_90a": (64, 32, 228 << 10), "sm_100": (64, 32, 228 << 10),
    "sm_120": (48, 24, 100 << 10),
}  # fmt: skip
_CARDS = {"sm_80": "A100", "sm_86": "A100", "sm_89": "A100", "sm_90": "H100"}
_PRODUCTS = ("IDP.4A", "HMMA", "HGMMA", "FFMA")  # what the work is done by, the first there is
_WANTED = ("LDG.E.128", "IDP.4A", "HMMA", "HGMMA")


@dataclass(frozen=True)
class KernelCode:
    """A kernel of a candidate on an architecture; `sass` None where nothing disassembles it.

    `blocks` of `warps` warps each are launched.
    """

    usage: KernelUsage
    sass: Sass | None
    blocks: int
    warps: int

    @property
    def resident_blocks(self) -> int:
        """On a multiprocessor at a time."""
        warps, blocks, shared = _LIMITS[self.usage.arch]
        of_a_warp = -(-32 * self.usage.registers // _UNIT) * _UNIT
        fits = [blocks, warps // self.warps, _REGISTERS // of_a_warp // self.warps]
        if self.usage.shared_bytes:
            fits.append(shared // (self.usage.shared_bytes + 1024))  # the system's own part
        return min(fits)

    @property
    def identity(self) -> tuple[object, ...]:
        """What equals that of another kernel which runs the same instructions."""
        sass = self.sass.instructions if self.sass else self.usage.kernel
        return self.usage.registers, self.usage.shared_bytes, self.blocks, self.warps, sass

    @property
    def spilled_bytes(self) -> int:
        return self.usage.spill_store_bytes + self.usage.spill_load_bytes

    @property
    def instructions(self) -> float | None:
        """Of the hot loop for each product there; None if it has none."""
        if self.sass is None:
            return None
        loop = Sass(self.sass.kernel, self.sass.hot_loop())
        products = next((loop.count(p) for p in _PRODUCTS if loop.count(p)), 0)
        return loop.instructions_per_weight(products) if products else None


def refusal(code: Sequence[KernelCode], beside: Sequence[KernelCode], fewest: float) -> str:
    """Why a candidate need not be timed; empty if it may be fast.

    `beside` is the code in use; `fewest` are the instructions a product of the best candidate.
    """
    spilled = sum(each.spilled_bytes for each in code)
    if spilled > sum(each.spilled_bytes for each in beside):
        return f"spills {spilled} bytes"
    for each in code:
        if each.usage.shared_bytes > MOST_SHARED:
            return f"{each.usage.shared_bytes} bytes of shared memory, a block has {MOST_SHARED}"
        resident = each.resident_blocks * each.warps
        if resident < min(LEAST_WARPS, each.warps * each.blocks):
            return (
                f"{each.usage.registers} registers and {each.usage.shared_bytes} bytes of shared"
                f" memory leave {resident} warps resident"
            )
    lacking = [w for w in _WANTED if _has(beside, w) and not _has(code, w)]
    if lacking and _is_read(code):
        return f"has no {', '.join(lacking)}"
    needs = code[0].instructions if code else None
    if needs is not None and needs > MOST_INSTRUCTIONS * fewest:
        return f"{needs:.1f} instructions a product, another has {fewest:.1f}"
    return ""


def predicted_us(code: Sequence[KernelCode], n_bytes: int, operations: int) -> float:
    """What a call of the candidate should take on the card of its architecture.

    `operations` counts a multiply-add as two; 0 us if nothing is known of its code.
    """
    if not code:
        return 0.0
    gpu, first = GPUS[_CARDS.get(code[0].usage.arch, "H200")], code[0]
    slots = gpu.multiprocessors * max(1, first.resident_blocks)
    waves = first.blocks / slots
    tail = max(1, -(-first.blocks // slots)) / max(1.0, waves)
    return (
        math.hypot(_memory_us(first, gpu, n_bytes, waves), _issue_us(first, gpu, operations)) * tail
    )


def _memory_us(code: KernelCode, gpu: Gpu, n_bytes: int, waves: float) -> float:
    bytes_s = REACHED * gpu.gb_s * 1e9
    if code.sass is not None:
        resident = min(1.0, waves) * code.resident_blocks * code.warps
        in_flight = gpu.multiprocessors * resident * 32 * code.sass.loaded_bytes()
        bytes_s *= in_flight / (in_flight + _HALF * bytes_s * _LATENCY_S)
    return 1e6 * n_bytes / max(1.0, bytes_s)


def _issue_us(code: KernelCode, gpu: Gpu, operations: int) -> float:
    """By instructions a product of the hot loop: of dp4a, four multiply-adds of a lane."""
    needs = code.instructions
    if needs is None or code.sass is None or not code.sass.count("IDP.4A"):
        return 0.0
    issued = needs * operations / 2 / 4 / 32
    return issued / (gpu.multiprocessors * 4 * gpu.ghz * 1e3)


def _has(code: Sequence[KernelCode], opcode: str) -> bool:
    return any(each.sass is not None and each.sass.count(opcode) for each in code)


def _is_read(code: Sequence[KernelCode]) -> bool:
    return any(each.sass is not None for each in code)
