"""Device code made while TVM builds: by a compiler of ours, reported, never left as source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import tvm_ffi

from xpuc.codegen.cuda import driver, pipeline
from xpuc.codegen.cuda.compiler import Compiler, Fatbin
from xpuc.codegen.cuda.find import find_compiler
from xpuc.codegen.cuda.kernel_text import for_alone
from xpuc.errors import XpucError

_CALLBACK = "tvm_callback_cuda_compile"


@dataclass
class DeviceCode:
    """What one build made: a fatbin for each module of kernels, which TVM has usually one of."""

    compiler: str
    archs: tuple[str, ...]
    alone: Mapping[str, Collection[str]]  # kernels that are not for all of them
    fatbins: list[Fatbin] = field(default_factory=list)

    def as_manifest(self) -> dict[str, Any]:
        """As JSON holds it: the compiler, the bytes, and what each kernel takes."""
        return {
            "compiler": self.compiler,
            "archs": list(self.archs),
            "fatbin_bytes": sum(len(f.code) for f in self.fatbins),
            "kernels": [
                asdict(row)
                for fatbin in self.fatbins
                for row in fatbin.usage
                if row.arch in self.alone.get(row.kernel, self.archs)
            ],
        }


def require() -> Compiler:
    """The compiler that `compiling` takes; XpucError where it or TVM's CUDA half is missing."""
    compiler = find_compiler()
    driver.load()
    return compiler


@contextmanager
def compiling(
    archs: Sequence[str],
    compiler: Compiler | None = None,
    alone: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Iterator[DeviceCode]:
    """TVM builds inside `with` make machine code for these architectures.

    `alone` says of kernels that are not for all of them which they are for.
    XpucError where the compiler or TVM's CUDA half is missing, and for what does not compile.
    """
    compiler = compiler or require()
    driver.load()
    pipeline.register()
    made = DeviceCode(compiler.name, tuple(archs), alone)
    failures: list[XpucError] = []

    def compile_source(source: str) -> bytes:
        try:
            made.fatbins.append(compiler.compile(for_alone(source, alone), archs))
        except XpucError as failure:  # TVM would make it an error of its own
            failures.append(failure)
            raise
        return made.fatbins[-1].code

    before = tvm_ffi.get_global_func(_CALLBACK, allow_missing=True)
    tvm_ffi.register_global_func(_CALLBACK, compile_source, override=True)
    try:
        yield made
    except Exception:
        if failures:
            raise failures[0] from None
        raise
    finally:
        tvm_ffi.remove_global_func(_CALLBACK)
        if before is not None:
            tvm_ffi.register_global_func(_CALLBACK, before)


def check_no_source(library: Any) -> None:
    """XpucError if a library holds CUDA source in place of machine code.

    TVM falls back to that where its CUDA half is not loaded; such an artifact would need a compiler
    on every machine it runs on, and fail there.
    """
    modules = [library]
    while modules:
        module = modules.pop()
        modules.extend(module.imports)
        if module.kind == "cuda" and not module.is_runnable():
            raise XpucError(
                "TVM made CUDA source in place of machine code",
                "unset TVM_COMPILE_FORCE_FALLBACK; if it is not set, please report this",
            )
