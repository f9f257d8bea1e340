"""Operations to kernel launches: an entry point at a time, for a fixed or symbolic number of rows.

Every packed matrix becomes its planes in the target's layout; every operation becomes the launches
of the schedule picked for it, or of the target-free kernel where no schedule takes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import IRModule, relax, tirx

from xpuc.codegen.kernels import portable
from xpuc.codegen.operations import Operation
from xpuc.ir import ops, scope
from xpuc.ir.formats import format_of
from xpuc.schedules import Schedule, Site, TargetFacts, Weight, pick, serving
from xpuc.tune_db import TuneDb

Var = Any
Type = Any


@dataclass(frozen=True)
class Plan:
    """What lowering decides by."""

    target: TargetFacts
    schedules: Sequence[Schedule]
    planes: Callable[
        [str, int, int], Sequence[Any]
    ]  # (format, rows, columns) -> planes of the layout
    db: TuneDb
    block_tokens: int
    kv_dtype: str
    deterministic: bool


@dataclass
class Lowered:
    """The module under construction: kernels are shared by all entry points."""

    plan: Plan
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    kernels: dict[tirx.PrimFunc, Any] = field(default_factory=dict)  # kernel -> GlobalVar
    operations: dict[str, Operation] = field(default_factory=dict)
    targets: dict[str, set[str]] = field(default_factory=dict)  # what each kernel is for

    def add_kernel(self, kernel: tirx.PrimFunc, target: TargetFacts | None = None) -> Any:
        """The module's function for a kernel; equal kernels are one function."""
        if kernel not in self.kernels:
            name = str(kernel.attrs["global_symbol"])
            self.kernels[kernel] = self.builder.add_func(kernel.without_attr("global_symbol"), name)
        found = self.kernels[kernel]
        self.targets.setdefault(str(found.name_hint), set()).add((target or self.plan.target).cpu)
        return found

    def alone(self) -> dict[str, set[str]]:
        """The kernels that are not for all GPU architectures of the target: which they are for."""
        return {
            f"{name}_kernel": cpus
            for name, cpus in self.targets.items()
            if self.plan.target.cpu not in cpus
        }

    def operation(self, site: Site) -> Operation:
        """What is known of the operation at a site; its schedule is picked at its first use."""
        plan = self.plan
        if site.target != plan.target:
            common = replace(site, target=plan.target)
            if self._schedule(site) is self._schedule(common):
                site = common
        arch = "" if site.target == plan.target else site.target.cpu
        label = json.dumps([arch, _of_any_rows(site.facts())], sort_keys=True)
        if label not in self.operations:
            choice = pick(site, plan.schedules, plan.db, deterministic=plan.deterministic)
            self.operations[label] = Operation.at(site, choice, arch)
        return self.operations[label]

    def _schedule(self, site: Site) -> Schedule | None:
        return serving(site, self.plan.schedules, deterministic=self.plan.deterministic)

    def finish(self) -> IRModule:
        return self.builder.finalize()


def _of_any_rows(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a site but for whose rows they are, those of the step or the wanted ones: its
    kernels are the same."""

    def unnamed(types: Any) -> Any:
        if isinstance(types, list):
            return [unnamed(each) for each in types]
        return "n" if types == "m" else types

    return facts | {name: unnamed(facts[name]) for name in ("operands", "result")}


class _Entry:
    """One entry point being lowered: an Emitter for its schedules."""

    def __init__(
        self,
        lowered: Lowered,
        function: relax.Function,
        name: str,
        rows: int | None,
        copied: Collection[str],
        target: TargetFacts,
    ) -> None:
        self.lowered, self.name, self.rows, self.copied = lowered, name, rows, copied
        self.target = target
        self.launched: list[str] = []  # the kernels of the operation being lowered
        self.zeroed: dict[str, Var] = {}  # tensors of zeros, by their types
        self.function = _for_rows(function, rows)
        self.builder = lowered.builder
        self.new: dict[Var, Any] = {}
        self.weights: dict[Var, tuple[str, int]] = {}

    def launch(self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type]) -> Var:
        kernel_var = self.kernel(kernel)
        return self.builder.emit(relax.call_tir(kernel_var, list(inputs), list(outputs)))

    def launch_in_place(
        self, kernel: Any, inputs: Sequence[Var], outputs: Sequence[Type], inplace: Sequence[int]
    ) -> Var:
        kernel_var = self.kernel(kernel)
        return self.builder.emit(
            relax.call_tir_inplace(kernel_var, list(inputs), list(inplace), list(outputs))
        )

    def kernel(self, kernel: tirx.PrimFunc) -> Any:
        found = self.lowered.add_kernel(kernel, self.target)
        self.launched.append(str(found.name_hint))
        return found

    def zeros(self, ty: Type) -> Var:
        label = str(ty)
        if label not in self.zeroed:
            columns = int(ty.shape[1])
            self.zeroed[label] = self.run(self.site("zeros", {"columns": columns}, (), (), ty))
        return self.zeroed[label]

    def item(self, value: Var, index: int) -> Var:
        return self.builder.emit(relax.TupleGetItem(value, index))

    def emit(self, value: Any) -> Var:
        return self.builder.emit(value)

    def params(self) -> list[Var]:
        """Index inputs and pools as they are; a matrix becomes its planes; then the copies."""
        formats = _formats(self.function)
        params: list[Var] = []
        copies: list[Var] = []
        for p in self.function.params:
            if p not in formats:
                self.new[p] = p
                params.append(p)
                continue
            format_name, columns = formats[p]
            rows = int(p.ty.shape[0])
            planes = tuple(
                relax.Var(f"{p.name}.{plane.name}", ops.tensor((plane.size,), plane.dtype))
                for plane in self.lowered.plan.planes(format_name, rows, columns)
            )
            codes = None
            if p.name in self.copied:
                codes = relax.Var(f"{p.name}.codes", ops.tensor((rows * columns,), "int8"))
                copies.append(codes)
            self.new[p] = Weight(format_name, rows, columns, planes, codes)
            params.extend(planes)
        return [*params, *copies]

    def lower(self, bounds: Mapping[str, int]) -> None:
        """Emit the entry point; `bounds` are the largest values of the symbols it keeps."""
        params = self.params()
        attrs = {"tir_var_upper_bound": dict(bounds)}
        with scope.function(self.builder, self.name, params, attrs):
            with self.builder.dataflow():
                for b in self.function.body.blocks[0].bindings:
                    self.new[b.var] = self.binding(b.value)
                out = self.builder.emit_output(self.new[self.function.body.body])
            self.builder.emit_func_output(out)

    def binding(self, value: Any) -> Any:
        if isinstance(value, relax.Var):
            return self.new[value]
        if isinstance(value, relax.TupleGetItem):
            return self.item(self.new[value.tuple_value], value.index)
        return self.call(value)

    def call(self, value: relax.Call) -> Var:
        operands: list[Var] = []
        weights: list[Weight] = []
        for a in value.args:
            new = self.new.get(a, a) if isinstance(a, relax.Var) else a
            if isinstance(new, Weight):
                weights.append(new)
            elif isinstance(new.ty, relax.TupleType):
                operands.extend(self.item(new, i) for i in range(len(new.ty.fields)))
            else:
                operands.append(new)
        name, attrs = str(ops.name_of(value)), ops.attrs_of(value)
        return self.run(self.site(name, attrs, tuple(operands), tuple(weights), value.ty))

    def run(self, site: Site) -> Var:
        """Emit the operation at a site."""
        operation = self.lowered.operation(site)
        operation.uses[self.name] += 1
        outer, self.launched = self.launched, []
        choice = operation.choice
        if choice is None:
            result = portable.emit(self, site)
        else:
            result = choice.schedule.emit(self, site, choice.knobs)
        operation.kernels[:] = self.launched
        self.launched = outer
        return result

    def site(
        self,
        op: str,
        attrs: dict[str, Any],
        operands: tuple[Var, ...],
        weights: tuple[Weight, ...],
        result: Type,
    ) -> Site:
        plan = self.lowered.plan
        return Site(
            op=op, attrs=attrs, n=self.rows, operands=operands, weights=weights, result=result,
            target=self.target, block_tokens=plan.block_tokens, kv_dtype=plan.kv_dtype,
        )  # fmt: skip


def lower(
    lowered: Lowered,
    function: relax.Function,
    name: str,
    rows: int | None,
    bounds: Mapping[str, int],
    copied: Collection[str] = (),
    target: TargetFacts | None = None,
) -> None:
    """Add the entry point `name` to the module: `function` for `rows` rows, or for any number.

    After all planes it takes the int8 copies of the matrices that `copied` names, in their order.
    `target` is one of the plan's architectures where it is for that alone.
    """
    _Entry(lowered, function, name, rows, copied, target or lowered.plan.target).lower(bounds)


def _for_rows(function: relax.Function, rows: int | None) -> relax.Function:
    """The function with its number of rows fixed, and other symbols of its own: bounds differ."""
    symbols = {
        d.name: d
        for p in function.params
        for d in getattr(p.ty, "shape", ())
        if isinstance(d, tirx.Var)
    }
    fresh = {v: tirx.Var(name, "int64") for name, v in symbols.items()}
    return function.bind_symbolic_vars(fresh | ({symbols["n"]: rows} if rows else {}))


def weight_formats(function: relax.Function) -> Iterator[tuple[str, str, int, int]]:
    """(tensor name, format, rows, columns) of every matrix the function takes, in order."""
    for p, (format_name, columns) in _formats(function).items():
        yield p.name, format_name, int(p.ty.shape[0]), columns


def _formats(function: relax.Function) -> dict[Var, tuple[str, int]]:
    """The format and the columns of each matrix parameter, in the order of the parameters.

    They follow from the operations that read it; a matrix nobody reads keeps its place without a
    format.
    """
    found: dict[Var, str] = {}
    for b in function.body.blocks[0].bindings:
        if ops.name_of(b.value) is None:
            continue
        attrs = ops.attrs_of(b.value)
        names = attrs.get("formats") or ((attrs["format"],) if "format" in attrs else ())
        matrices = [a for a in b.value.args if isinstance(a, relax.Var) and _is_matrix(a)]
        found.update(zip(matrices, names, strict=True))
    formats: dict[Var, tuple[str, int]] = {}
    for p in function.params:
        if p in found:
            fmt = format_of(found[p])
            formats[p] = (fmt.name, int(p.ty.shape[1]) // fmt.nbytes * fmt.n)
    return formats


def _is_matrix(var: Var) -> bool:
    return isinstance(var.ty, relax.TensorType) and str(var.ty.dtype) == "uint8"
