"""What a schedule would launch, without a module to launch it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tvm_ffi
import xxhash
from tvm import relax

from xpuc.schedules.site import Site, Type, Var

if TYPE_CHECKING:
    from xpuc.schedules import Schedule


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments: inputs, then the outputs that are not written in place.

    `zeros` are those inputs that nobody gives: they are zeros before the launch and after it.
    """

    kernel: Any
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    inplace: tuple[int, ...] = ()
    zeros: tuple[Var, ...] = ()

    @property
    def name(self) -> str:
        return str(self.kernel.attrs["global_symbol"])


@dataclass
class Launches:
    """An Emitter that keeps the launches in order."""

    made: list[Launch] = field(default_factory=list)
    _fields: dict[Var, Sequence[Var]] = field(default_factory=dict)
    _zeros: list[Var] = field(default_factory=list)

    def launch(self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type]) -> Var:
        results = tuple(relax.Var("y", ty) for ty in outputs)
        self.made.append(Launch(kernel, tuple(inputs), results, zeros=self._zeros_of(inputs)))
        return self._value(results)

    def launch_in_place(
        self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type], inplace: Sequence[int]
    ) -> Var:
        results = [
            relax.Var("y", ty) if i < 0 else inputs[i]
            for ty, i in zip(outputs, inplace, strict=True)
        ]
        new = tuple(r for r, i in zip(results, inplace, strict=True) if i < 0)
        zeros = self._zeros_of(inputs)
        self.made.append(Launch(kernel, tuple(inputs), new, tuple(inplace), zeros))
        return self._value(results)

    def zeros(self, ty: Type) -> Var:
        self._zeros.append(relax.Var("zeros", ty))
        return self._zeros[-1]

    def _zeros_of(self, inputs: Sequence[Var]) -> tuple[Var, ...]:
        return tuple(v for v in inputs if any(v.same_as(z) for z in self._zeros))

    def item(self, value: Var, index: int) -> Var:
        return self._fields[value][index]

    def emit(self, value: Any) -> Var:
        return value

    def _value(self, results: Sequence[Var]) -> Var:
        if len(results) == 1:
            return results[0]
        whole = relax.Var("ys", relax.TupleType([r.ty for r in results]))
        self._fields[whole] = results
        return whole


def launches(schedule: Schedule, site: Site, knobs: Any) -> list[Launch]:
    """The launches of the schedule at a site."""
    emitter = Launches()
    schedule.emit(emitter, site, knobs)
    return emitter.made


def kernel_digest(schedule: Schedule, site: Site, knobs: Any) -> str:
    """What tells the kernels a schedule builds here from those of other knobs or other sources.

    It follows from their structure alone, so a comment or a new name changes nothing.
    """
    state = xxhash.xxh3_64()
    for launch in launches(schedule, site, knobs):
        plain = launch.kernel.without_attr("global_symbol")
        state.update(
            tvm_ffi.structural_hash(plain, map_free_vars=True).to_bytes(8, "little", signed=False)
        )
    return state.hexdigest()
