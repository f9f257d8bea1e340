"""The machine an artifact is compiled for: its name, TVM's target, what schedules decide by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm.target import Target

from xpuc.artifact import CPU_FEATURES
from xpuc.codegen.cuda import archs
from xpuc.errors import UnsupportedError, nearest
from xpuc.schedules import TargetFacts

KINDS = {"llvm": "-mcpu", "cuda": "-arch"}  # the option that names the CPU, the architectures


@dataclass(frozen=True)
class CompileTarget:
    """A target of `xpuc compile`."""

    facts: TargetFacts
    triple: str  # of the CPU, which a GPU's host is
    tvm: Any
    archs: tuple[str, ...] = ()  # of a GPU: those there is code for
    special: tuple[TargetFacts, ...] = ()  # those of them with kernels of their own for prompts

    def as_manifest(self) -> dict[str, Any]:
        """What the loader compares with the machine it runs on."""
        return {
            "kind": self.facts.kind,
            "triple": self.triple,
            "cpu": self.facts.cpu,
            "features": sorted(self.facts.features),
        }


def resolve(target: str, cpu: str | None = None) -> CompileTarget:
    """The target of a string, `llvm`, `llvm -mcpu=znver3`, `cuda`, `cuda -arch=sm_80,sm_90a`.

    `cpu` is another place for what the option names: a CPU by LLVM's name, the host's own if none
    is named; or GPU architectures, the common ones if none is. UnsupportedError names what is not
    known.
    """
    kind, named = _parse(target)
    if named and cpu and named != cpu:
        raise UnsupportedError(
            f"--target {target} and --cpu {cpu}: they differ", "leave one of them out"
        )
    triple = str(tvm_ffi.get_global_func("target.llvm_get_system_triple")())
    return (_cuda if kind == "cuda" else _cpu)(named or cpu, triple)


def _parse(target: str) -> tuple[str, str | None]:
    """The kind, and what its option names."""
    kind, *options = target.split() or [""]
    if kind not in KINDS:
        raise UnsupportedError(f"unknown target: {kind!r}", nearest(kind, KINDS))
    named = None
    for option in options:
        name, _, value = option.partition("=")
        if name != KINDS[kind] or not value:
            raise UnsupportedError(
                f"--target {target}: {option!r} is not an option of it", f"write {KINDS[kind]}=NAME"
            )
        named = value
    return kind, named


def _cuda(names: str | None, triple: str) -> CompileTarget:
    found = archs.parse(names) if names else archs.DEFAULT
    common = archs.common(found)
    tvm = Target(
        {
            "kind": "cuda",
            "arch": found[0].name,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": common.shared_bytes,
            "thread_warp_size": 32,
        },
        host={"kind": "llvm", "mtriple": triple},
    )
    special = tuple(_facts(arch) for arch in archs.special(found))
    return CompileTarget(_facts(common), triple, tvm, tuple(arch.name for arch in found), special)


def _facts(arch: archs.Arch) -> TargetFacts:
    return TargetFacts("cuda", arch.name, arch.features, arch.shared_bytes)


def _cpu(cpu: str | None, triple: str) -> CompileTarget:
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
