"""Which compiler makes the device code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from xpuc.codegen.cuda.compiler import Compiler
from xpuc.codegen.cuda.nvcc import nvcc_at
from xpuc.codegen.cuda.nvrtc import Nvrtc
from xpuc.codegen.cuda.wheels import INSTALL, nvrtc_version, wheel_folder
from xpuc.errors import XpucError


def find_compiler() -> Compiler:
    """The nvcc that $CUDACXX names, else PyPI's NVRTC, else the nvcc of a CUDA toolkit.

    NVRTC goes first because its version is the one xpuc asks for: the registers and instructions of
    every kernel are tested with it. XpucError says how to get one.
    """
    named = os.environ.get("CUDACXX")
    if named:
        return nvcc_at(Path(shutil.which(named) or named))
    version, folder = nvrtc_version(), wheel_folder()
    if version is not None and folder is not None:
        return Nvrtc(folder, version)
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for path in (shutil.which("nvcc"), Path(toolkit) / "bin" / "nvcc"):
        if path is not None and Path(path).is_file():
            return nvcc_at(Path(path))
    raise XpucError("no CUDA compiler", f"{INSTALL}, or set CUDACXX to an nvcc of CUDA 13")
