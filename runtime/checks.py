"""Whether an artifact fits this machine: versions, CPU features, digests, and what mends it."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xpuc.artifact import (
    CPU_FEATURES,
    MANIFEST,
    WEIGHTS,
    Manifest,
    compile_again,
    copy_again,
    digest,
    header_digest,
)
from xpuc.errors import ArtifactError


def check_versions(directory: Path, manifest: Manifest) -> None:
    """The TVM FFI must be of the series the library was linked against: its ABI changes."""
    wanted = manifest.tvm_ffi_version
    install = f"pip install 'apache-tvm-ffi=={wanted}'"
    try:
        found = version("apache-tvm-ffi")
    except PackageNotFoundError:
        raise ArtifactError(
            f"{directory}: needs apache-tvm-ffi {wanted}, none is installed", install
        ) from None
    if series(found) != series(wanted):
        raise ArtifactError(
            f"{directory}: compiled with apache-tvm-ffi {wanted}, installed is {found}",
            f"{install}, or {compile_again(directory)}",
        )


def host_features() -> frozenset[str]:
    """Of CPU_FEATURES, those this CPU has, by LLVM's names; empty where they cannot be told."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", info.read_text(), re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return frozenset(name for name, flag in CPU_FEATURES.items() if flag in present)


def check_target(directory: Path, manifest: Manifest) -> None:
    """The machine's architecture, its system and the CPU extensions the kernels use."""
    triple, system = str(manifest.target["triple"]), platform.system().lower()
    if triple.split("-", 1)[0] != platform.machine() or system not in triple:
        raise ArtifactError(
            f"{directory}: compiled for {triple}, this machine is {platform.machine()}-{system}",
            f"on this machine, {compile_again(directory)}",
        )
    present = host_features()
    missing = (set(manifest.target["features"]) & set(CPU_FEATURES)) - present
    if present and missing:
        raise ArtifactError(
            f"{directory}: needs CPU features this machine lacks: {', '.join(sorted(missing))}",
            f"on this machine, or with --cpu x86-64-v2 for any, {compile_again(directory)}",
        )


def check_files(directory: Path, manifest: Manifest) -> None:
    """Every file is there and whole: the weights by size and header digest, the rest by digest."""
    for name, facts in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path}: missing", copy_again(directory))
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise ArtifactError(
                f"{path}: {size} bytes, the manifest says {facts['bytes']}", copy_again(directory)
            )
        if name == WEIGHTS:
            _compare(directory, name, header_digest(path), facts["header_xxh3_128"])
        elif not name.startswith("reports/"):
            _compare(directory, name, digest(path), facts["xxh3_128"])


def verify(
    directory: Path, manifest: Manifest, progress: Callable[[str], None] = lambda name: None
) -> int:
    """Check every byte of every file; the number of bytes that were read."""
    check_files(directory, manifest)
    total = 0
    for name, facts in manifest.files.items():
        progress(name)
        _compare(directory, name, digest(directory / name), facts["xxh3_128"])
        total += facts["bytes"]
    return total + (directory / MANIFEST).stat().st_size


def _compare(directory: Path, name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ArtifactError(
            f"{directory / name}: damaged, its digest is {found[:12]}…,"
            f" the manifest says {wanted[:12]}…",
            copy_again(directory),
        )


def series(text: str) -> tuple[int, ...]:
    """The part of a version within which the library's ABI stays: 0.1.14 of 0.1.14.post1."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
