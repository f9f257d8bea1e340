"""Module to library: plan the memory, build with LLVM, link with the C compiler at hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm import IRModule, relax, transform

from xpuc.codegen import cuda
from xpuc.codegen.calling import operands_in_a_tuple, result_given
from xpuc.codegen.linker import export, require_linker
from xpuc.codegen.memory_plan import plan_memory, storage_bytes
from xpuc.codegen.target import CompileTarget


@dataclass(frozen=True)
class Built:
    """A linked library and what its entry points allocate."""

    path: Path
    activation_bytes: dict[str, int]  # planned storage of each entry point
    device: cuda.DeviceCode | None = None  # of a GPU target


def require_tools(machine: CompileTarget) -> None:
    """XpucError where the machine's code cannot be built here: no linker, no compiler for GPUs."""
    require_linker()
    if machine.archs:
        cuda.require()


def plan(module: IRModule) -> tuple[IRModule, dict[str, int]]:
    """Lower calls to destination passing with planned storage, and its bytes by entry point."""
    planned = transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            plan_memory(),
            result_given(),
        ]
    )(module)
    return planned, {
        gv.name_hint: storage_bytes(f)
        for gv, f in planned.functions_items()
        if isinstance(f, relax.Function)
    }


def build(
    module: IRModule,
    machine: CompileTarget,
    path: Path,
    *,
    alone: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Built:
    """Compile the planned module for the machine and link it at `path`.

    `alone` says of kernels that are not for all of its architectures which they are for.
    """
    planned, activation_bytes = plan(module)
    finish = transform.Sequential(
        [
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            _without_operand_checks(),
            operands_in_a_tuple(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )
    executable, device = _executable(planned, machine, finish, alone)
    export(executable, path)
    return Built(path, activation_bytes, device)


def _executable(
    planned: IRModule, machine: CompileTarget, finish: Any, alone: Mapping[str, Collection[str]]
) -> tuple[Any, cuda.DeviceCode | None]:
    """The VM's executable, and the code for GPUs that it holds."""
    if not machine.archs:
        return relax.build(planned, machine.tvm, relax_pipeline=finish), None
    with machine.tvm, cuda.compiling(machine.archs, alone=alone) as device:
        bound = cuda.bind_threads(planned, machine.tvm)
        built = relax.build(bound, machine.tvm, relax_pipeline=finish, tir_pipeline=cuda.PIPELINE)
    cuda.check_no_source(built.mod)
    return built, device


def _without_operand_checks() -> Any:
    """Drop the VM's checks of a step's operands, but for those that read a symbol from a shape.

    A step has hundreds of weights, and the runtime passes the same ones every time: sized by the
    manifest when they are mapped. The checks cost 0.2 ms of a 5 ms step, and their messages half of
    the library.
    """

    def keep(binding: Any) -> bool:
        value = binding.value
        callee = str(getattr(getattr(value, "op", None), "global_symbol", ""))
        if callee == "vm.builtin.check_tensor_info":
            return False
        if callee == "vm.builtin.match_shape":
            return _STORES_A_SYMBOL in _match_codes(value)
        return True

    def strip(module: IRModule, _context: Any) -> IRModule:
        functions = {}
        for gv, f in module.functions_items():
            if isinstance(f, relax.Function):
                blocks = [
                    relax.BindingBlock([b for b in block.bindings if keep(b)])
                    for block in f.body.blocks
                ]
                body = relax.SeqExpr(blocks, f.body.body)
                f = relax.Function(f.params, body, f.ret_ty, f.is_pure, f.attrs)
            functions[gv] = f
        return IRModule(functions, attrs=module.attrs)

    return transform.module_pass(strip, opt_level=0, name="without_operand_checks")


_STORES_A_SYMBOL = 1  # of relax's MatchShapeCode


def _match_codes(match: relax.Call) -> list[int]:
    """What a match_shape (tensor, heap, n, code, value, code, ...) does with each dimension."""
    n = int(match.args[2].value)
    return [int(match.args[3 + 2 * i].value) for i in range(n)]
