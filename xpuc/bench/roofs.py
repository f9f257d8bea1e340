"""What a machine allows at most, measured beside the work: reading memory, multiplying bytes.

The loops are in the artifact, in the instructions of its target: a machine that runs artifacts may
lack a compiler. The manifest says how much a call of each is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from xpuc.artifact import Manifest


@dataclass(frozen=True)
class Roofs:
    """Bytes a second read from memory; operations a second on int8 (a multiply-add is two), None
    where the target has no byte products."""

    bytes_s: float
    operations_s: float | None = None

    def limit(self, n_bytes: int, operations: int) -> tuple[float, str | None]:
        """The least seconds for so much work, and what sets them: memory, int8 or nothing."""
        reading = n_bytes / self.bytes_s
        computing = operations / self.operations_s if self.operations_s else 0.0
        if not (reading or computing):
            return 0.0, None
        return (reading, "memory") if reading >= computing else (computing, "int8")

    def as_json(self) -> dict[str, float | None]:
        """GB/s and Gop/s, rounded."""
        peak = self.operations_s
        return {
            "read_gb_s": round(self.bytes_s / 1e9, 1),
            "int8_gop_s": round(peak / 1e9, 1) if peak else None,
        }

    def __str__(self) -> str:
        read = f"memory is read at {self.bytes_s / 1e9:.1f} GB/s"
        peak = self.operations_s
        return read + (f", int8 peak {peak / 1e9:,.0f} Gop/s" if peak else "")


def combined(measured: Sequence[Roofs], how: Callable[[list[float]], float]) -> Roofs:
    """Several measurements as one, such as by `max` or `statistics.median`."""
    peaks = [roofs.operations_s for roofs in measured if roofs.operations_s]
    return Roofs(how([roofs.bytes_s for roofs in measured]), how(peaks) if peaks else None)


class HasLoops(Protocol):
    """runtime.model.Model is one."""

    def loop(self, name: str, elements: int) -> Callable[[], float]:
        """What makes a call of a loop of the library, and gives its seconds."""
        ...


class Loop:
    """A call that is so much work, and gives the seconds it took."""

    def __init__(self, seconds: Callable[[], float], amount: int) -> None:
        self._seconds, self._amount = seconds, amount

    def measure(self, repeat: int) -> float:
        """Work a second of all threads together, the fastest of `repeat` calls."""
        self._seconds()  # wakes the threads
        return self._amount / min(self._seconds() for _ in range(repeat))


class RoofLoops:
    """The loops of a loaded artifact."""

    def __init__(self, model: object, manifest: Manifest) -> None:
        loops = cast("HasLoops", model)
        read, product = manifest.decisions["memory_read"], manifest.decisions.get("int8_peak")
        self._read = Loop(loops.loop("memory_read", int(read["elements"])), int(read["bytes"]))
        self._product: Loop | None = None
        if product is not None:
            run = loops.loop("int8_peak", int(product["elements"]))
            self._product = Loop(run, int(product["operations"]))

    def measure(self, repeat: int = 1) -> Roofs:
        """The fastest of `repeat` calls of each, since a roof is what can be had."""
        operations_s = None if self._product is None else self._product.measure(repeat)
        return Roofs(self._read.measure(repeat), operations_s)
