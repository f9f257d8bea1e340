"""What `xpuc doctor` looks at: packages, compiler, processor, memory, GPU."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpuc.cli import quantities, requirements, sources
from xpuc.codegen.linker import find_linker

FINE, GAP, NOTE = "ok", "missing", "note"
# What the packages of an extra are for.
USES = {
    "": "",
    "compile": ", to compile",
    "cuda": ", to compile for NVIDIA GPUs",
    "tune": ", for xpuc tune",
    "grammar": ", for answers of a given form: --json-schema, --regex, --grammar",
    "store": ", for K/V that outlives the process: --store",
    "peer": ", for xpuc bench --vs llama.cpp",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `needed_for` is run, compile or nothing."""

    subject: str
    mark: str
    found: str
    fix: str = ""
    needed_for: str = ""


def examine() -> list[Finding]:
    """Everything, in the order it is shown."""
    return [
        _python(),
        *_packages(),
        *_compiler(),
        _processor(),
        _memory(),
        _gpu(),
        _cache(),
    ]


def verdicts(findings: list[Finding]) -> dict[str, bool]:
    """What the machine can do: every needed thing is there."""
    gaps = {each.needed_for for each in findings if each.mark == GAP}
    return {"can_run": "run" not in gaps, "can_compile": not gaps & {"run", "compile"}}


def _python() -> Finding:
    return Finding("python", FINE, f"{platform.python_version()} ({sys.executable})")


def _packages() -> Iterator[Finding]:
    for each in requirements.declared():
        if each.name in ("editables", "xpuc"):  # of development; an extra that needs another
            continue
        needed = {"": "run", "compile": "compile"}.get(each.extra, "")
        wanted = f"{each.pins or 'any version'}{USES[each.extra]}"
        if each.is_met:
            yield Finding(each.name, FINE, f"{each.installed} ({wanted})", "", needed)
            continue
        package = f"xpuc[{each.extra}]" if each.extra else "xpuc"
        found = f"{each.installed or 'not installed'} ({wanted})"
        if each.extra == "peer":
            yield _peer(each.name, found)
        else:
            mark = GAP if needed else NOTE
            yield Finding(each.name, mark, found, f"pip install '{package}'", needed)


def _peer(name: str, found: str) -> Finding:
    built = requirements.installed("llama-cpp-python")
    if built is not None:
        return Finding("llama-cpp-python", FINE, f"{built}, for xpuc bench --vs llama.cpp")
    return Finding(name, NOTE, found, f"pip install {name}")


def _compiler() -> Iterator[Finding]:
    """What compiling needs besides packages: TVM itself must load, and something must link."""
    linker = find_linker()
    if linker is not None:
        yield Finding("C compiler", FINE, " ".join(linker))
    else:
        yield Finding(
            "C compiler", GAP, "none found", "apt install gcc, or pip install ziglang", "compile"
        )
    if requirements.installed("apache-tvm") is None:
        return
    try:
        from xpuc.codegen.target import resolve

        machine = resolve("llvm")
    except Exception as error:  # whatever keeps TVM from working is the finding
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        yield Finding(
            "tvm",
            GAP,
            f"does not load: {reason}",
            "pip install --force-reinstall 'xpuc[compile]'",
            "compile",
        )
        return
    yield Finding("LLVM target", FINE, f"{machine.triple} {machine.facts.cpu}")


def _processor() -> Finding:
    from xpuc.runtime.checks import host_features
    from xpuc.runtime.model import default_threads

    features = host_features()
    fast = {"avx2", "fma", "f16c"} <= features
    kernels = "fast kernels (AVX2)" if fast else "portable kernels only"
    names = " ".join(sorted(features)) or "no vector extensions known"
    found = f"{_cpu_name()}, {quantities.count(default_threads(), 'thread')}, {kernels}: {names}"
    return Finding("processor", FINE if fast else NOTE, found)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> Finding:
    from xpuc.runtime.memory import free_bytes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding(
        "memory", FINE, f"{quantities.size(free_bytes())} free of {quantities.size(total)}"
    )


def _gpu() -> Finding:
    """Through NVIDIA's driver library alone: nothing else need be installed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("GPU", NOTE, "no NVIDIA driver; this version of xpuc runs on the CPU")
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return Finding("GPU", NOTE, "an NVIDIA driver, but no GPU it can use")
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode())
    return Finding("GPU", NOTE, f"{', '.join(names)}; this version of xpuc does not use it")


def _cache() -> Finding:
    folder = sources.cache_dir()
    models = list(folder.glob("*.xpuc")) if folder.is_dir() else []
    total = sum(
        file.stat().st_size for model in models for file in model.rglob("*") if file.is_file()
    )
    return Finding(
        "cache",
        FINE,
        f"{folder}: {quantities.count(len(models), 'model')}, {quantities.size(total)}",
    )
