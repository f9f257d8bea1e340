"""The machine an artifact is compiled for: its name, TVM's target, what schedules decide by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm.target import Target

from xpuc.errors import UnsupportedError, nearest
from xpuc.schedules import TargetFacts

KINDS = ("llvm",)


@dataclass(frozen=True)
class CompileTarget:
    """A target of `xpuc compile`."""

    facts: TargetFacts
    triple: str
    tvm: Any

    def as_manifest(self) -> dict[str, Any]:
        """What the loader compares with the machine it runs on."""
        return {
            "kind": self.facts.kind,
            "triple": self.triple,
            "cpu": self.facts.cpu,
            "features": sorted(self.facts.features),
        }


def resolve(kind: str, cpu: str | None = None) -> CompileTarget:
    """The target of this kind for a CPU by LLVM's name; the host's own where none is named."""
    if kind not in KINDS:
        raise UnsupportedError(f"unknown target: {kind!r}", nearest(kind, KINDS))
    triple = str(tvm_ffi.get_global_func("target.llvm_get_system_triple")())
    if cpu and not tvm_ffi.get_global_func("target.llvm_is_valid_cpu")(cpu, triple):
        # LLVM itself would compile for a generic CPU and say nothing.
        known = tvm_ffi.get_global_func("target.llvm_get_cpu_archlist")
        names = map(str, known(Target({"kind": "llvm", "mtriple": triple})))
        raise UnsupportedError(f"unknown CPU: {cpu!r}", nearest(cpu, names))
    name = cpu or str(tvm_ffi.get_global_func("target.llvm_get_system_cpu")())
    target = Target({"kind": "llvm", "mcpu": name, "mtriple": triple})
    return CompileTarget(TargetFacts("llvm", name, cpu_features(target)), triple, target)


def cpu_features(target: Any) -> frozenset[str]:
    """The instruction set extensions LLVM will use for the target, by LLVM's names."""
    found = tvm_ffi.get_global_func("target.llvm_get_cpu_features")(target)
    return frozenset(str(name) for name in found)
