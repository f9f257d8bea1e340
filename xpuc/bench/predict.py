"""What a decode step would take on a GPU nobody has at hand: predicted from the manifest alone.

A kernel takes a launch and, after it, the longer of reading its bytes from memory and issuing its
instructions. Nothing is measured: the facts are NVIDIA's, the rest is assumed and named so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xpuc.artifact import pool_arrays
from xpuc.schedules.packed import packed

LAUNCH_US = 2.0  # assumed: a kernel of a CUDA graph, from one's end to the next one's first read
REACHED = 0.8  # assumed: of the bandwidth of memory, by kernels that read weights or K/V
_SCHEDULERS, _LANES = 4, 32  # of a multiprocessor; of a warp, which issues an instruction a cycle
_OTHER = 4.0  # instructions a weight of a format that is not in the table

# Of a projection of one row for each weight; tests hold the machine code to it.
INSTRUCTIONS = {
    "Q4_0": 1.6, "Q4_1": 1.6, "Q8_0": 1.6, "Q2_K": 2.5, "Q3_K": 2.5, "Q4_K": 2.0, "Q5_0": 2.5,
    "Q5_1": 2.5, "Q5_K": 2.5, "Q6_K": 2.5, "IQ4_NL": 3.0, "IQ4_XS": 3.0,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A GPU by NVIDIA's data sheets: bandwidth of memory, multiprocessors, boost clock."""

    gb_s: float
    multiprocessors: int
    ghz: float


GPUS = {
    "A100": Gpu(2039, 108, 1.41),  # SXM, 80 GB
    "H100": Gpu(3350, 132, 1.98),  # SXM
    "H200": Gpu(4800, 132, 1.98),
}


@dataclass(frozen=True)
class Predicted:
    """One call of an operation: bytes of weights and K/V, launches, and what bounds it."""

    name: str
    uses: int
    n_bytes: int
    launches: int
    memory_us: float
    issue_us: float

    @property
    def us(self) -> float:
        return self.launches * LAUNCH_US + max(self.memory_us, self.issue_us)

    @property
    def parts_us(self) -> dict[str, float]:
        """What it waits for; of bandwidth and issue the longer hides the other."""
        return {
            "bandwidth": self.memory_us,
            "issue": self.issue_us,
            "launch": self.launches * LAUNCH_US,
        }

    @property
    def bound(self) -> str:
        """The largest part of it: bandwidth, issue or launch."""
        return max(self.parts_us, key=lambda part: self.parts_us[part])

    def as_json(self) -> dict[str, Any]:
        """For machines, rounded; of one call."""
        return {
            "bytes": self.n_bytes, "launches": self.launches, "us": round(self.us, 2),
            "memory_us": round(self.memory_us, 2), "issue_us": round(self.issue_us, 2),
            "bound": self.bound,
        }  # fmt: skip

    def __str__(self) -> str:
        launches = f"{self.launches} launch" + "es" * (self.launches != 1)
        parts = ", ".join(f"{part} {us:,.1f}" for part, us in self.parts_us.items())
        return f"{self.us:,.1f} us a call: {parts} ({self.n_bytes:,} bytes, {launches})"


@dataclass(frozen=True)
class PredictedStep:
    """A step of `rows` rows of a model of `layers` layers on a GPU."""

    gpu: str
    rows: int
    layers: int
    operations: Mapping[str, Predicted]

    @property
    def us(self) -> float:
        return sum(each.uses * each.us for each in self.operations.values())

    @property
    def bounds_us(self) -> dict[str, float]:
        """The step's microseconds by what bounds the operation."""
        parts = dict.fromkeys(("bandwidth", "issue", "launch"), 0.0)
        for each in self.operations.values():
            parts[each.bound] += each.uses * each.us
        return parts

    @property
    def bound(self) -> str:
        parts = self.bounds_us
        return max(parts, key=lambda part: parts[part])

    @property
    def launches(self) -> int:
        return sum(each.uses * each.launches for each in self.operations.values())

    @property
    def layer_launches(self) -> int:
        """Of a layer, without the few of a step that are of none."""
        return self.launches // self.layers

    @property
    def tok_s(self) -> float:
        return 1e6 * self.rows / self.us

    def as_json(self) -> dict[str, Any]:
        """For machines, rounded."""
        return {
            "gpu": self.gpu, "step_us": round(self.us, 1), "tok_s": round(self.tok_s, 1),
            "launches": self.launches, "layers": self.layers,
            "layer_launches": self.layer_launches, "bound": self.bound,
            "bounds_us": {name: round(us, 1) for name, us in self.bounds_us.items()},
            "operations": {name: each.as_json() for name, each in self.operations.items()},
            "assumed": {"launch_us": LAUNCH_US, "bandwidth_reached": REACHED},
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"predicted for {self.gpu}, not measured: {self.us:,.0f} us a step,"
            f" {self.tok_s:,.0f} tok/s, {self.launches} launches"
            f" ({self.layer_launches} a layer), mostly {self.bound}"
        )
        for each in self.operations.values():
            yield f"  {each.name}: {each}"
        parts = ", ".join(f"{name} {us:,.0f} us" for name, us in self.bounds_us.items())
        yield f"by bound: {parts}"
        yield f"assumed: {LAUNCH_US:g} us a launch in a graph, {REACHED:.0%} of the bandwidth"


def predict(
    operations: Sequence[Mapping[str, Any]], entry: str, rows: int, depth: int, gpu: str
) -> PredictedStep:
    """The step of these operations of a manifest: `rows` rows of one sequence after `depth`."""
    own = [o for o in operations if entry in o["uses"]]
    found = {o["name"]: _operation(o, entry, rows, depth, GPUS[gpu]) for o in own}
    layers = sum(int(o["uses"][entry]) for o in own if o["op"] == "attention")
    return PredictedStep(gpu, rows, max(1, layers), found)


def _operation(
    operation: Mapping[str, Any], entry: str, rows: int, depth: int, gpu: Gpu
) -> Predicted:
    weights = [(str(f), int(r), int(k)) for f, r, k in operation["weights"]]
    if operation["op"] == "embed":  # only the rows that the tokens name
        weights = [(f, rows, k) for f, _, k in weights]
    n_bytes = sum(_weight_bytes(*w) for w in weights) + _kv_bytes(operation, depth, rows)
    issued = sum(INSTRUCTIONS.get(f, _OTHER) * r * k for f, r, k in weights) / _LANES
    return Predicted(
        operation["name"], int(operation["uses"][entry]), n_bytes, len(operation["kernels"]),
        memory_us=n_bytes / (REACHED * gpu.gb_s * 1e3),
        issue_us=issued / (gpu.multiprocessors * _SCHEDULERS * gpu.ghz * 1e3),
    )  # fmt: skip


def _weight_bytes(format: str, rows: int, columns: int) -> int:
    """Of a packed matrix."""
    facts = packed(format)
    block = sum(np.dtype(p.dtype).itemsize * p.per_block for p in facts.planes)
    return rows * math.ceil(columns / facts.columns) * block


def _kv_bytes(operation: Mapping[str, Any], depth: int, rows: int) -> int:
    """Of what attention reads of the pool of a layer."""
    if operation["op"] != "attention":
        return 0
    a, block_tokens = operation["attrs"], int(operation["block_tokens"])
    arrays = pool_arrays(
        operation["kv_dtype"], block_tokens, int(a["kv_heads"]), int(a["head_dim"])
    )
    tokens = min(depth + rows, int(a["window"]) or depth + rows)
    return tokens * sum(array.block_bytes for array in arrays) // block_tokens
