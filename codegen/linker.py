"""The C compiler that links a library: whatever the machine has."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xpuc.errors import XpucError

COMPILERS = ("cc", "gcc", "clang", "g++", "c++")


def find_linker() -> list[str] | None:
    """The command that links a shared library: $CC, a compiler on PATH, or PyPI's ziglang.

    XpucError if $CC is no command.
    """
    if os.environ.get("CC"):
        return _named(os.environ["CC"])
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def _named(command: str) -> list[str]:
    """The words of $CC."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without an end
        words = []
    if not words or shutil.which(words[0]) is None:
        raise XpucError(
            f"CC is {command}: there is no such command", "set CC to a C compiler, or unset it"
        )
    return words


def require_linker() -> list[str]:
    """The command; XpucError says how to get one."""
    found = find_linker()
    if found is None:
        raise XpucError(
            "no C compiler to link the library with",
            "install one (apt install gcc), or pip install ziglang, which serves as well",
        )
    return found


def export(built: Any, path: Path) -> None:
    """Link what TVM has built to a library; what is made on the way lies beside it meanwhile."""
    linker = require_linker()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        built.export_library(
            str(path),
            workspace_dir=folder,
            fcompile=lambda output, objects, **_: link(linker, output, objects),
        )


def link(
    linker: Sequence[str], output: str, objects: Sequence[str], options: Sequence[str] = ()
) -> None:
    """Link objects to a shared library; XpucError with the linker's last line if it fails.

    Not TVM's create_shared: it puts its options after the first word of the command.
    """
    command = [*linker, "-shared", "-fPIC", "-o", output, *options, *objects]
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
