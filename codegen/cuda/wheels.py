"""NVIDIA's libraries and headers as PyPI has them (`pip install 'xpuc[cuda]'`)."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xpuc.errors import XpucError

INSTALL = "pip install 'xpuc[cuda]'"


def wheel_folder() -> Path | None:
    """The folder all of them install into: lib, include, bin."""
    if importlib.util.find_spec("nvidia") is None:
        return None
    spec = importlib.util.find_spec("nvidia.cu13")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def wheel_library(name: str) -> Path:
    """A library by its file name; XpucError if no wheel brought it."""
    folder = wheel_folder()
    if folder is None or not (folder / "lib" / name).is_file():
        raise XpucError(f"{name} is not installed", INSTALL)
    return folder / "lib" / name


def nvrtc_version() -> str | None:
    """That of the installed NVRTC wheel."""
    try:
        return version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return None
