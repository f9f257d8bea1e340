"""How a model may be decoded besides one row a step: decided once, with the reason.

batched    several sequences share one pass over the weights
pipelined  a step is queued before the one before it is read; needs a device
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xpuc.artifact import Manifest


@dataclass(frozen=True, slots=True)
class Mode:
    """`reason` says why it is on, or what refuses it."""

    name: str
    is_on: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name} decode: {'on' if self.is_on else 'off'} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Modes:
    """Latched: what a request does changes none of them."""

    batched: Mode
    pipelined: Mode

    def __iter__(self) -> Iterator[Mode]:
        return iter((self.batched, self.pipelined))


def modes_of(manifest: Manifest) -> Modes:
    """What an artifact allows."""
    return Modes(_batched(manifest), _pipelined(manifest))


def _batched(manifest: Manifest) -> Mode:
    rows = {e.name: e.rows for e in manifest.entry_points if e.kind == "decode" and e.rows > 1}
    if not rows:
        return Mode("batched", False, "compiled for one row a step, --max-batch 1")
    for operation in manifest.operations:
        if operation["weights"] and operation["origin"] == "portable" and _is_of(operation, rows):
            reason = f"{operation['name']}: no schedule of the target takes several rows of it"
            return Mode("batched", False, reason)
    return Mode("batched", True, f"up to {max(rows.values())} rows a step")


def _is_of(operation: dict[str, dict[str, int]], entries: dict[str, int]) -> bool:
    return not entries.keys().isdisjoint(operation["uses"])


def _pipelined(manifest: Manifest) -> Mode:
    kind = manifest.target["kind"]
    if kind == "llvm":
        return Mode("pipelined", False, "no device: target llvm computes on the host")
    return Mode("pipelined", False, f"not built for target {kind}")
