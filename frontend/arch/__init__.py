"""One file an architecture; the file name is GGUF's general.architecture."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from xpuc.errors import UnsupportedError, nearest

# Names under which a checkpoint may ask for an architecture that is built by another file.
ALIASES = {"mistral": "llama", "smollm": "llama", "tinyllama": "llama", "smollm2": "llama"}


def known() -> tuple[str, ...]:
    """Every architecture that can be compiled."""
    here = Path(__file__).parent
    return tuple(sorted(p.stem for p in here.glob("*.py") if p.stem not in ("__init__", "blocks")))


def architecture(name: str, path: str) -> ModuleType:
    """The module that builds `name`: its `config(reader, tensors)` and `build(graph, config)`."""
    name = ALIASES.get(name, name)
    if name not in known():
        raise UnsupportedError(
            f"{path}: unknown model architecture: {name!r}",
            nearest(name, (*known(), *ALIASES)),
        )
    return import_module(f"{__name__}.{name}")
