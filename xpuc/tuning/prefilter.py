"""Candidates for a GPU judged without one: by what ptxas says of them, and by their machine code.

What has no chance is refused with a reason; the rest is put in the order of a model: its launches
run one after the other, and each takes about the longer of reading its tensors and issuing its
instructions, and reads the faster the more it has in flight. The model ranks; it does not say how
long anything takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xpuc.bench.predict import GPUS, REACHED, Gpu
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.sass import Sass

LEAST_WARPS = 8  # resident on a multiprocessor, or a kernel waits for memory most of the time
MOST_CYCLES = 1.5  # a product, in terms of the candidate that needs fewest
MOST_SHARED = 48 << 10  # bytes that a block is given without asking for more at launch
_LATENCY_S = 8e-7  # assumed: of memory under load
_HALF = 0.25  # assumed: in terms of bandwidth times latency, in flight where half of it is reached
_REGISTERS, _UNIT = 65536, 256  # of a multiprocessor; a warp is given whole units
_LIMITS = {  # resident warps, blocks and bytes of shared memory of a multiprocessor
    "sm_80": (64, 32, 164 << 10), "sm_86": (48, 16, 100 << 10), "sm_89": (48, 24, 100 << 10),
    "sm_90": (64, 32, 228 << 10), "sm_90a": (64, 32, 228 << 10), "sm_100": (64, 32, 228 << 10),
    "sm_120": (48, 24, 100 << 10),
}  # fmt: skip
_SYSTEM = 1024  # bytes of the shared memory of each block, for itself
_CARDS = {"sm_80": "A100", "sm_86": "A100", "sm_89": "A100", "sm_90": "H100"}
# What multiplies, the first there is. Not FFMA: it scales, too, and attention has it in two loops,
# of which a knob makes the one or the other the longer.
_PRODUCTS = ("HGMMA", "IMMA", "HMMA", "IDP.4A")
_RATES = {"HGMMA": 16, "IMMA": 16, "HMMA": 8}  # assumed: multiply-adds of a lane a cycle, at most
_SCHEDULERS = 4  # of a multiprocessor, each issues an instruction of a warp a cycle
_WANTED = ("LDG.E.128", "IDP.4A", "HMMA", "HGMMA")


@dataclass(frozen=True)
class KernelCode:
    """A kernel of a candidate on an architecture; `sass` None where nothing disassembles it.

    `blocks` of `warps` warps each are launched, for each of which `asked_bytes` of shared memory
    are asked beside those that `usage` has; the tensors of the launch are `n_bytes`.
    """

    usage: KernelUsage
    sass: Sass | None
    blocks: int
    warps: int
    asked_bytes: int = 0
    n_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.usage.shared_bytes + self.asked_bytes

    @property
    def resident_blocks(self) -> int:
        """On a multiprocessor at a time."""
        warps, blocks, shared = _LIMITS[self.usage.arch]
        of_a_warp = -(-32 * self.usage.registers // _UNIT) * _UNIT
        fits = [blocks, warps // self.warps, _REGISTERS // of_a_warp // self.warps]
        if self.shared_bytes:
            fits.append(shared // (self.shared_bytes + _SYSTEM))
        return min(fits)

    @property
    def most_shared(self) -> int:
        """Bytes that a block may have: what it does not ask for at the launch is limited."""
        return _LIMITS[self.usage.arch][2] - _SYSTEM if self.asked_bytes else MOST_SHARED

    @property
    def identity(self) -> tuple[object, ...]:
        """What equals that of another kernel which runs the same instructions."""
        sass = self.sass.instructions if self.sass else self.usage.kernel
        return self.usage.registers, self.shared_bytes, self.blocks, self.warps, sass

    @property
    def spilled_bytes(self) -> int:
        return self.usage.spill_store_bytes + self.usage.spill_load_bytes

    @property
    def multiplies_by(self) -> str | None:
        """The opcode of its products; None if it has none."""
        if self.sass is None:
            return None
        return next((opcode for opcode in _PRODUCTS if self.sass.count(opcode)), None)

    @property
    def instructions(self) -> float:
        """Of the hot loop of products for each multiply-add of a lane there."""
        opcode = self.multiplies_by
        if self.sass is None or opcode is None:
            return 0.0
        loop = self.sass.hot_loop(opcode)
        multiply_adds = sum(_multiply_adds(i.opcode) for i in loop if i.is_a(opcode))
        return self.sass.instructions_per_weight(multiply_adds, opcode)

    @property
    def cycles(self) -> float:
        """Of a scheduler for a multiply-add of a lane: to issue, or what tensor cores take."""
        opcode = self.multiplies_by
        if opcode is None:
            return 0.0
        return max(self.instructions, 1 / _RATES[opcode] if opcode in _RATES else 0.0)


def product_of(code: Sequence[KernelCode]) -> KernelCode | None:
    """Of a candidate's launches the one that multiplies; others prepare and finish its work."""
    found = [each for each in code if each.multiplies_by]
    return min(found, key=lambda each: _PRODUCTS.index(each.multiplies_by or ""), default=None)


def fewest_cycles(candidates: Iterable[Sequence[KernelCode]]) -> float:
    """Those of the candidate that needs fewest; 0 if nothing is known of any."""
    products = (product_of(code) for code in candidates)
    return min((p.cycles for p in products if p is not None), default=0.0)


def refusal(code: Sequence[KernelCode], beside: Sequence[KernelCode], fewest: float) -> str:
    """Why a candidate need not be timed; empty if it may be fast.

    `beside` is the code in use; `fewest` see `fewest_cycles`. Every launch has to stand.
    """
    spilled = sum(each.spilled_bytes for each in code)
    if spilled > sum(each.spilled_bytes for each in beside):
        return f"spills {spilled} bytes"
    for each in code:
        if each.shared_bytes > each.most_shared:
            return f"{each.shared_bytes} bytes of shared memory, a block has {each.most_shared}"
        resident = each.resident_blocks * each.warps
        if resident < min(LEAST_WARPS, each.warps * each.blocks):
            return (
                f"{each.usage.registers} registers and {each.shared_bytes} bytes of shared"
                f" memory leave {resident} warps resident"
            )
    lacking = [w for w in _WANTED if _has(beside, w) and not _has(code, w)]
    if lacking and _is_read(code):
        return f"has no {', '.join(lacking)}"
    product = product_of(code)
    if product is not None and product.cycles > MOST_CYCLES * fewest:
        return f"{product.cycles / fewest:.1f} times the cycles of another for a product"
    return ""


def predicted_us(code: Sequence[KernelCode], operations: int) -> float:
    """What a call of the candidate, all its launches, should take on the card of its architecture.

    `operations`, those of the launch that multiplies, counts a multiply-add as two; 0 us if nothing
    is known of its code.
    """
    product = product_of(code)
    return sum(_launch_us(each, operations if each is product else 0) for each in code)


def _launch_us(code: KernelCode, operations: int) -> float:
    gpu = GPUS[_CARDS.get(code.usage.arch, "H200")]
    slots = gpu.multiprocessors * max(1, code.resident_blocks)
    waves = code.blocks / slots
    tail = max(1, -(-code.blocks // slots)) / max(1.0, waves)
    return math.hypot(_memory_us(code, gpu, waves), _issue_us(code, gpu, operations)) * tail


def _memory_us(code: KernelCode, gpu: Gpu, waves: float) -> float:
    bytes_s = REACHED * gpu.gb_s * 1e9
    loaded = code.sass.loaded_bytes() if code.sass else 0
    if loaded:
        resident = min(1.0, waves) * code.resident_blocks * code.warps
        in_flight = gpu.multiprocessors * resident * 32 * loaded
        bytes_s *= in_flight / (in_flight + _HALF * bytes_s * _LATENCY_S)
    return 1e6 * code.n_bytes / bytes_s


def _issue_us(code: KernelCode, gpu: Gpu, operations: int) -> float:
    """By the cycles of products, on multiprocessors that have blocks."""
    busy = min(gpu.multiprocessors, code.blocks) * _SCHEDULERS
    return code.cycles * operations / 2 / 32 / (busy * gpu.ghz * 1e3)


def _multiply_adds(opcode: str) -> int:
    """Of a lane: HMMA.16816.F32 has 16 x 8 x 16 among 32, HGMMA.64x128x16.F32 among 128, IDP 4."""
    name, _, rest = opcode.partition(".")
    shape = rest.partition(".")[0]
    if name == "HGMMA":
        return math.prod(map(int, shape.split("x"))) // 128
    if name in ("HMMA", "IMMA"):
        return int(shape[:2]) * int(shape[2]) * int(shape[3:]) // 32
    return 4


def _has(code: Sequence[KernelCode], opcode: str) -> bool:
    return any(each.sass is not None and each.sass.count(opcode) for each in code)


def _is_read(code: Sequence[KernelCode]) -> bool:
    return any(each.sass is not None for each in code)
