"""The GPU architectures code is made for: what a kernel may use on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpuc.errors import UnsupportedError, nearest


@dataclass(frozen=True)
class Arch:
    """One architecture, by NVIDIA's name; `a` at the end: of that compute capability alone."""

    name: str
    shared_bytes: int  # a block may have, if it asks at launch
    features: frozenset[str]


_AMPERE = frozenset({"mma", "cp.async"})
_HOPPER = _AMPERE | {"tma", "griddepcontrol"}
_KIB = 1 << 10

ARCHS = {  # those of artifact.GPU_ARCHS
    arch.name: arch
    for arch in (
        Arch("sm_80", 163 * _KIB, _AMPERE),  # A100
        Arch("sm_86", 99 * _KIB, _AMPERE),  # GeForce 30, A10
        Arch("sm_89", 99 * _KIB, _AMPERE),  # GeForce 40, L4, L40
        Arch("sm_90", 227 * _KIB, _HOPPER),
        Arch("sm_90a", 227 * _KIB, _HOPPER | {"wgmma"}),  # H100, H200
        Arch("sm_100", 227 * _KIB, _HOPPER),  # B200
        Arch("sm_120", 99 * _KIB, _HOPPER),  # GeForce 50
    )
}
_OF_PROMPTS = frozenset({"wgmma"})  # what prompts have kernels of their own for
DEFAULT = tuple(ARCHS[name] for name in ("sm_80", "sm_89", "sm_90a"))


def parse(names: str) -> tuple[Arch, ...]:
    """Those of a list with commas, oldest first; UnsupportedError if one is not known."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in ARCHS:
            raise UnsupportedError(f"unknown GPU architecture: {name!r}", nearest(name, ARCHS))
    return tuple(arch for arch in ARCHS.values() if arch.name in wanted)


def special(archs: Sequence[Arch]) -> tuple[Arch, ...]:
    """Those of several that prompts have kernels of their own on."""
    shared = common(archs).features
    return tuple(arch for arch in archs if _OF_PROMPTS & (arch.features - shared))


def common(archs: Sequence[Arch]) -> Arch:
    """What holds on each of them: most kernels are written once for all."""
    return Arch(
        ",".join(a.name for a in archs),
        min(a.shared_bytes for a in archs),
        frozenset.intersection(*(a.features for a in archs)),
    )
