"""Module to library: plan the memory, build with LLVM, link with the C compiler at hand."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import IRModule, relax, transform

from xpuc.errors import XpucError

COMPILERS = ("cc", "gcc", "clang", "g++", "c++")


@dataclass(frozen=True)
class Built:
    """A linked library and what its entry points allocate."""

    path: Path
    activation_bytes: dict[str, int]  # planned storage of each entry point


def find_linker() -> list[str] | None:
    """The command that links a shared library: $CC, a compiler on PATH, or PyPI's ziglang."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def plan(module: IRModule) -> tuple[IRModule, dict[str, int]]:
    """Lower calls to destination passing with planned storage, and its bytes by entry point."""
    planned = transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
        ]
    )(module)
    return planned, {
        gv.name_hint: _storage_bytes(f)
        for gv, f in planned.functions_items()
        if isinstance(f, relax.Function)
    }


def build(module: IRModule, target: Any, path: Path) -> Built:
    """Compile the planned module and link it at `path`."""
    linker = find_linker()
    if linker is None:
        raise XpucError(
            "no C compiler to link the library with",
            "install one (apt install gcc), or pip install ziglang, which serves as well",
        )
    planned, activation_bytes = plan(module)
    finish = transform.Sequential(
        [
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )
    executable = relax.build(planned, target, relax_pipeline=finish)

    def link(output: str, objects: list[str], **_: Any) -> None:
        _link(linker, output, objects)

    executable.export_library(str(path), fcompile=link)
    return Built(path, activation_bytes)


def _link(linker: list[str], output: str, objects: list[str]) -> None:
    """Not TVM's create_shared: it puts its options after the first word of the command."""
    command = [*linker, "-shared", "-fPIC", "-o", output, *objects]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise XpucError(
            f"{shlex.join(linker)}: cannot be started ({error.strerror})",
            "set CC to a C compiler, or unset it",
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise XpucError(
            f"{shlex.join(linker)}: cannot link the library ({said[-1]})",
            "set CC to another C compiler, or pip install ziglang and unset it",
        )


def _storage_bytes(function: relax.Function) -> int:
    total = 0

    def visit(expr: Any) -> None:
        nonlocal total
        if (
            isinstance(expr, relax.Call)
            and getattr(expr.op, "name", "") == "relax.memory.alloc_storage"
        ):
            sizes = expr.args[0].values
            total += int(sizes[0])

    relax.analysis.post_order_visit(function, visit)
    return total
