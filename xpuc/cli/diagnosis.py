"""What `xpuc doctor` looks at: packages, compiler, processor, memory, GPU."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpuc.cli import quantities, requirements, sources
from xpuc.codegen.linker import find_linker
from xpuc.errors import XpucError

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
    """One thing that was looked at; `needed_for` is run, compile, the same with " cuda" behind it
    (for NVIDIA GPUs), or nothing."""

    subject: str
    mark: str
    found: str
    fix: str = ""
    needed_for: str = ""


def examine() -> list[Finding]:
    """Everything, in the order it is shown."""
    gpu = _gpu()  # first: the compiler for GPUs brings a libcuda of its own where there is none
    return [
        _python(),
        *_packages(),
        *_compiler(),
        _cuda_compiler(),
        _processor(),
        _memory(),
        gpu,
        _cache(),
    ]


def verdicts(findings: list[Finding]) -> dict[str, bool]:
    """What the machine can do: every needed thing is there."""
    gaps = {each.needed_for for each in findings if each.mark != FINE}
    runs, compiles = "run" not in gaps, not gaps & {"run", "compile"}
    return {
        "can_run": runs, "can_compile": compiles,
        "can_run_cuda": runs and "run cuda" not in gaps,
        "can_compile_cuda": compiles and "compile cuda" not in gaps,
    }  # fmt: skip


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
    yield _linker()
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


def _linker() -> Finding:
    try:
        linker = find_linker()
    except XpucError as error:
        return Finding("C compiler", GAP, error.message, error.hint, "compile")
    if linker is not None:
        return Finding("C compiler", FINE, " ".join(linker))
    return Finding(
        "C compiler", GAP, "none found", "apt install gcc, or pip install ziglang", "compile"
    )


def _cuda_compiler() -> Finding:
    """What would make code for GPUs, and for which."""
    subject, needed = "CUDA compiler", "compile cuda"
    if requirements.installed("apache-tvm") is None:
        return Finding(subject, NOTE, "apache-tvm is missing", "pip install 'xpuc[cuda]'", needed)
    try:
        from xpuc.codegen import cuda
        from xpuc.codegen.cuda.archs import ARCHS

        compiler = cuda.require()
    except XpucError as error:
        return Finding(subject, NOTE, error.message, error.hint, needed)
    except Exception as error:  # of a TVM that does not load, which has a finding of its own
        return Finding(subject, NOTE, f"TVM does not load ({type(error).__name__})", "", needed)
    return Finding(subject, FINE, f"{compiler.name}, for {' '.join(ARCHS)}", "", needed)


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
    """Through NVIDIA's libraries alone: what an artifact for GPUs needs besides itself."""
    from xpuc.runtime.nvidia import first_gpu

    try:
        gpu = first_gpu()
    except XpucError as error:
        return Finding("GPU", NOTE, error.message, error.hint, "run cuda")
    memory = f"{quantities.size(gpu.free_bytes)} free of {quantities.size(gpu.total_bytes)}"
    found = f"{gpu.name}, compute capability {gpu.capability}, {memory}, driver of CUDA"
    return Finding("GPU", FINE, f"{found} {gpu.driver}", "", "run cuda")


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
