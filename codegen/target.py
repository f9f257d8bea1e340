"""The machine an artifact is compiled for: its name, TVM's target, what schedules decide by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm.target import Target

from xpuc.artifact import CPU_FEATURES
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
    name = cpu or _host_cpu(triple)
    target = _llvm(name, triple)
    return CompileTarget(TargetFacts("llvm", name, cpu_features(target)), triple, target)


def _llvm(cpu: str, triple: str) -> Any:
    return Target({"kind": "llvm", "mcpu": cpu, "mtriple": triple})


def _host_cpu(triple: str) -> str:
    """This machine's CPU as LLVM recognises it, or the best plain one it is sure to be.

    A virtual machine may hide features of the CPU it shows: the artifact would not load where it
    was compiled.
    """
    own = str(tvm_ffi.get_global_func("target.llvm_get_system_cpu")())
    host = host_features()
    if not triple.startswith("x86_64") or not host:
        return own
    for name in (own, "x86-64-v4", "x86-64-v3", "x86-64-v2"):
        if cpu_features(_llvm(name, triple)) & frozenset(CPU_FEATURES) <= host:
            return name
    return "x86-64"


def host_features() -> frozenset[str]:
    """What this machine has, by LLVM's names; empty where LLVM cannot tell."""
    found = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return frozenset(str(name) for name, present in dict(found).items() if present)


def cpu_features(target: Any) -> frozenset[str]:
    """The instruction set extensions LLVM will use for the target, by LLVM's names."""
    found = tvm_ffi.get_global_func("target.llvm_get_cpu_features")(target)
    return frozenset(str(name) for name in found)
