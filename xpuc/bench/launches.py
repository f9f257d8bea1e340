"""The kernels that a step launches: what each has to read from memory, and to compute.

Which operation a kernel belongs to is in the manifest; what it is called with is seen by running
the step once. Of its operands only weights and K/V count as bytes: activations were written just
before and are in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm_ffi

from xpuc.artifact import Manifest, Tail
from xpuc.runtime.batch import Batch, StepModel


class Transparent(StepModel, Protocol):
    """A model whose calls can be seen; runtime.model.Model is one."""

    def instrument(
        self, see: Callable[[str, Any, tuple[Any, ...]], None]
    ) -> AbstractContextManager[None]:
        """Inside, `see(name, function, arguments)` is told of every call before it is made."""
        ...

    def replayer(
        self, works: Sequence[tuple[str, Callable[[], object]]]
    ) -> Callable[[], dict[str, float]]:
        """What does some works again, and gives the seconds of those of a name together."""
        ...

    def operands(self) -> dict[int, str]:
        """What lies at which address: planes by name, arrays of the pools as `keys.LAYER`."""
        ...


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments. Calling it again as often as one likes changes nothing."""

    kernel: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    n_bytes: int  # of weights and K/V, each once
    operations: int  # on int8; a multiply-add is two


def launches(
    model: Transparent, manifest: Manifest, batch: Batch, *, tail: Tail = "greedy"
) -> list[Launch]:
    """Those of one step, in order; `batch` has to stay as it is while they are called."""
    operations = {kernel: each for each in manifest.operations for kernel in each["kernels"]}
    costs = _Costs(manifest, model.operands(), batch)
    found: list[Launch] = []

    def see(name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        if operation := operations.get(name):
            cost = costs.of(operation, [a for a in arguments if isinstance(a, tvm_ffi.Tensor)])
            found.append(Launch(name, function, arguments, *cost))

    with model.instrument(see):
        model.run(batch, tail=tail)
    return found


class _Costs:
    """What the launches of one step have to read and to compute."""

    def __init__(self, manifest: Manifest, operands: dict[int, str], batch: Batch) -> None:
        self._kv, self._operands = manifest.kv, operands
        self._plane_bytes = {
            plane.name: plane.size * np.dtype(plane.dtype).itemsize for plane in manifest.planes
        }
        self._rows = int(np.count_nonzero(batch.slots[0] >= 0))
        self._contexts = list(_contexts(batch))

    def of(self, operation: dict[str, Any], tensors: list[Any]) -> tuple[int, int]:
        """(bytes, operations) of a kernel of `operation`."""
        names = {self._operands.get(tensor.data_ptr(), "") for tensor in tensors}
        planes = [self._plane_bytes[name] for name in names if name in self._plane_bytes]
        pools = [name for name in names if name and name not in self._plane_bytes]
        kv = sum(self._kv_bytes(operation["op"], pool) for pool in pools)
        if not (planes and operation["weights"]):
            return sum(planes) + kv, 0
        if operation["op"] == "embed":  # only the rows that the tokens name
            (_, table_rows, _), *_ = operation["weights"]
            return sum(planes) * self._rows // table_rows, 0
        return sum(planes) + kv, _operations(operation["weights"], tensors[0])

    def _kv_bytes(self, op: str, pool: str) -> int:
        name, _, layer = pool.partition(".")
        array = next(a for a in self._kv.arrays(int(layer)) if a.name == name)
        *_, window = self._kv.layers[int(layer)]
        tokens = self._read(window) if op == "attention" else self._rows
        return tokens * array.block_bytes // self._kv.block_tokens

    def _read(self, window: int) -> int:
        """Tokens whose K/V attention reads, all sequences together."""
        return sum(
            last + 1 - (max(0, first + 1 - window) if window else 0)
            for first, last in self._contexts
        )


def _operations(weights: list[tuple[str, int, int]], activations: Any) -> int:
    """Of all rows of q8a activations, int8 (blocks, n, 32), with all weights; none on others."""
    if str(activations.dtype) != "int8":
        return 0
    columns = weights[0][2]
    n = math.prod(map(int, activations.shape)) // columns
    return 2 * n * sum(rows for _, rows, _ in weights) * columns


def _contexts(batch: Batch) -> Iterable[tuple[int, int]]:
    """The first and the last position that each sequence has in the step."""
    positions: dict[int, list[int]] = {}
    for row, n_rows, first_work, _ in batch.tiles.tolist():
        sequence = int(batch.work[first_work, 2])
        ends = batch.positions[[row, row + n_rows - 1]]
        positions.setdefault(sequence, []).extend(ends.tolist())
    return ((min(each), max(each)) for each in positions.values())
