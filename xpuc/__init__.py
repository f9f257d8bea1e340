"""xpuc: compile a language model to one artifact, and run it.

`compile`, `load` and `AsyncEngine` are fetched on first use, so that `import xpuc` imports neither
tvm nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpuc.codegen.compile import compile_model as compile
    from xpuc.runtime.async_engine import AsyncEngine
    from xpuc.runtime.engine import load

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "__version__", "compile", "load"]

_LAZY = {
    "AsyncEngine": ("xpuc.runtime.async_engine", "AsyncEngine"),
    "compile": ("xpuc.codegen.compile", "compile_model"),
    "load": ("xpuc.runtime.engine", "load"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'xpuc' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
