"""Kernels for a GPU compiled: for what their code says, and into libraries of a bundle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xpuc.codegen import cuda
from xpuc.codegen.cuda import sass
from xpuc.codegen.cuda.compiler import Compiler, Fatbin
from xpuc.codegen.cuda.find import find_compiler
from xpuc.codegen.linker import export
from xpuc.codegen.target import CompileTarget, resolve
from xpuc.errors import XpucError
from xpuc.schedules import Launch
from xpuc.schedules.cuda.grid import argument_bytes, grid_of
from xpuc.tuning.prefilter import KernelCode

_AT_ONCE = 8  # candidates in one module

Code = tuple[KernelCode, ...] | str  # of a candidate's launches, or why there is none


class _Source:
    """A compiler that makes nothing: for the source that TVM writes."""

    name = "none"

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        """See Compiler."""
        return Fatbin(b"none", (), source)


def named(launch: Launch, i: int) -> Any:
    """The launch's kernel under a name of the i-th candidate's own."""
    return launch.kernel.with_attr("global_symbol", f"{launch.name}_c{i}")


def compiled(
    candidates: Sequence[Sequence[Launch]], arch: str, symbols: Mapping[str, int]
) -> list[Code]:
    """The code of each candidate's launches, in their order, in a call of these `symbols`.

    Nothing is known of it if the compiler reports nothing.
    """
    compiler = find_compiler()
    groups = [range(i, min(i + _AT_ONCE, len(candidates)))
              for i in range(0, len(candidates), _AT_ONCE)]  # fmt: skip
    sources = [_source([named(p, i) for i in group for p in candidates[i]], arch)
               for group in groups]  # fmt: skip
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        made = list(pool.map(lambda source: _reported(compiler, source, arch), sources))
    found: list[Code] = []
    for group, report in zip(groups, made, strict=True):
        for i in group:
            if isinstance(report, str) and len(group) > 1:  # whose fault it is shows alone
                own = _source([named(p, i) for p in candidates[i]], arch)
                found.append(_code(candidates[i], i, _reported(compiler, own, arch), symbols))
            else:
                found.append(_code(candidates[i], i, report, symbols))
    return found


_Report = tuple[dict[str, Any], dict[str, sass.Sass]]


def _source(kernels: Sequence[Any], arch: str) -> str:
    """The CUDA source of kernels."""
    machine = resolve("cuda", arch)
    with machine.tvm, cuda.compiling(machine.archs, _Source()) as made:
        _compile(kernels, machine)
    return "\n".join(fatbin.source for fatbin in made.fatbins)


def _reported(compiler: Compiler, source: str, arch: str) -> _Report | str:
    """What there is to know of a source's kernels by name, or why it does not compile."""
    try:
        fatbin = compiler.compile(source, [arch])
        code = sass.disassemble(fatbin.code, arch) if fatbin.usage and sass.is_installed() else {}
    except XpucError as error:
        return error.message
    return {row.kernel: row for row in fatbin.usage}, code


def _code(
    parts: Sequence[Launch], i: int, report: _Report | str, symbols: Mapping[str, int]
) -> Code:
    if isinstance(report, str):
        return report
    usage, machine_code = report
    made = []
    for part in parts:
        name = f"{part.name}_c{i}_kernel"
        if name in usage:
            grid = grid_of(part, symbols)
            code = KernelCode(
                usage[name], machine_code.get(name), grid.blocks, grid.warps,
                grid.shared_bytes, argument_bytes(part, symbols),
            )  # fmt: skip
            made.append(code)
    return tuple(made)


def build(kernels: Iterable[Any], arch: str, path: Path) -> None:
    """Link kernels to a library that TVM's runtime loads."""
    machine = resolve("cuda", arch)
    with machine.tvm, cuda.compiling(machine.archs):
        made = _compile(list(kernels), machine)
    cuda.check_no_source(made.mod)
    export(made, path)


def _compile(kernels: Sequence[Any], machine: CompileTarget) -> Any:
    import tvm

    by_name = {str(k.attrs["global_symbol"]): k for k in kernels}
    return tvm.compile(tvm.IRModule(by_name), target=machine.tvm, tir_pipeline=cuda.PIPELINE)
