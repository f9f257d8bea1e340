"""Which results of a step take turns in which memory.

A step is one straight line of launches. A result lives from the launch that writes it to the last
that reads it, and results that never live at once can have one storage, of whatever dtype each is.
Kernels take no tensor that begins inside its storage, so a storage holds one result at a time.

The largest results are placed first, each in the smallest storage that is free while it lives. So
no storage ever grows, and what one layer leaves decides nothing for the next: 2 layers take what 24
do. (TVM's StaticPlanBlockMemory goes by the order of launches: a small result takes a free storage
of up to 16 times its size, the large one after it a new one, or a smaller one that has to grow.
Results of two dtypes never share there.)
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import IRModule, ir, relax, sym, transform

Var = Any
Binding = Any
_TENSOR, _STORAGE = "relax.builtin.alloc_tensor", "relax.memory.alloc_storage"


@dataclass(frozen=True)
class Lifetime:
    """Of a result: the launch that writes it and the last that reads it, and what it takes there:
    bytes, at most, of a place (device index and memory scope)."""

    first: int
    last: int
    n_bytes: int
    place: Hashable = None


@dataclass(eq=False)
class Storage:
    """Memory for results in turn."""

    n_bytes: int
    place: Hashable
    turns: list[tuple[int, int]] = field(default_factory=list)  # first and last launch, ascending

    def is_free(self, first: int, last: int) -> bool:
        """Whether nothing lives here in any of these launches."""
        i = bisect(self.turns, (first, last))
        return (i == 0 or self.turns[i - 1][1] < first) and (
            i == len(self.turns) or last < self.turns[i][0]
        )


def assign(lifetimes: Sequence[Lifetime]) -> list[Storage]:
    """A storage for each; results of equal size and length are placed as they are given."""
    storages: list[Storage] = []
    placed: dict[int, Storage] = {}
    order = sorted(enumerate(lifetimes), key=lambda each: _largest_and_longest(each[1]))
    for i, life in order:
        free = (s for s in storages if s.place == life.place and s.is_free(life.first, life.last))
        storage = min(free, key=lambda s: s.n_bytes, default=None)
        if storage is None:
            storage = Storage(life.n_bytes, life.place)
            storages.append(storage)
        insort(storage.turns, (life.first, life.last))
        placed[i] = storage
    return [placed[i] for i in range(len(lifetimes))]


def _largest_and_longest(life: Lifetime) -> tuple[int, int]:
    return -life.n_bytes, life.first - life.last


def plan_memory() -> Any:
    """The pass, for modules in destination passing whose functions launch kernels and no more.

    It leaves allocations and launches only: a storage before its first use, one tensor for each
    shape and dtype that a storage has in turn, and the function's result as it was.
    """

    def plan(module: IRModule, _context: Any) -> IRModule:
        functions = {
            gv: _planned(f) if isinstance(f, relax.Function) else f
            for gv, f in module.functions_items()
        }
        return IRModule(functions, attrs=module.attrs)

    named = transform.module_pass(plan, opt_level=0, name="plan_memory")
    return transform.Sequential([named, relax.transform.Normalize()])


def storage_bytes(function: relax.Function) -> int:
    """Of all storages of a planned function."""
    values = [b.value for block in function.body.blocks for b in block.bindings]
    return sum(int(value.args[0].values[0]) for value in values if _calls(value, _STORAGE))


def _planned(function: relax.Function) -> relax.Function:
    line, result = _straight_line(function)
    lifetimes = _lifetimes(function, line, result)
    placed = dict(zip(lifetimes, assign(list(lifetimes.values())), strict=True))
    made: dict[Storage, Var] = {}
    views: dict[tuple[Storage, str], Var] = {}
    view_of: dict[Var, Var] = {}
    bindings: list[Binding] = []
    for binding in line:
        var, call = binding.var, binding.value
        if var not in placed:
            args = [view_of.get(a, a) if isinstance(a, relax.Var) else a for a in call.args]
            bindings.append(relax.VarBinding(var, _with_args(call, args)))
            continue
        storage = placed[var]
        if storage not in made:
            made[storage] = relax.Var("storage", relax.AnyType())
            bindings.append(relax.VarBinding(made[storage], _alloc_storage(storage, call)))
        view_of[var] = views.setdefault((storage, str(var.ty)), var)
        if view_of[var].same_as(var):
            shape, dtype, *_ = call.args
            view = relax.op.memory.alloc_tensor(made[storage], 0, shape, dtype)
            bindings.append(relax.VarBinding(var, view))
    body = relax.SeqExpr([relax.BindingBlock(bindings)], result)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _alloc_storage(storage: Storage, tensor: relax.Call) -> relax.Call:
    """Of the place of a tensor's allocation."""
    _, _, device, scope = tensor.args
    size = relax.ShapeExpr([storage.n_bytes])
    return relax.op.memory.alloc_storage(size, device, scope, "uint8")


def _straight_line(function: relax.Function) -> tuple[list[Binding], Var]:
    """The allocations and launches of a function with its tuples and second names put in, and the
    tensor that is its result."""
    meant: dict[Var, Any] = {}

    def known(value: Any) -> Any:
        if isinstance(value, relax.Var):
            return meant.get(value, value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([known(each) for each in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return known(value.tuple_value).fields[value.index]
        return value

    line = []
    for block in function.body.blocks:
        for b in block.bindings:
            if isinstance(b.value, relax.Call):
                call = _with_args(b.value, [known(a) for a in b.value.args])
                line.append(relax.VarBinding(b.var, call))
            else:
                meant[b.var] = known(b.value)
    return line, known(function.body.body)


def _lifetimes(
    function: relax.Function, line: Sequence[Binding], result: Var
) -> dict[Var, Lifetime]:
    """Of the tensors that a function allocates, but for its result."""
    most = _upper_bounds(function)
    turns: dict[Var, tuple[int, int]] = {}
    allocations: dict[Var, relax.Call] = {}
    launch = 0
    for binding in line:
        var, call = binding.var, binding.value
        if _calls(call, _TENSOR):
            if not var.same_as(result):
                allocations[var], turns[var] = call, (launch, launch)
            continue
        assert isinstance(call.op, ir.GlobalVar), f"{call.op}: what it does with memory is unknown"
        for arg in call.args:
            assert not isinstance(arg, relax.Tuple), f"{call.op}: takes a tuple"
            if isinstance(arg, relax.Var) and arg in turns:
                turns[arg] = (turns[arg][0], launch)
        launch += 1
    return {
        var: Lifetime(*turns[var], _n_bytes(var, most), _place(call))
        for var, call in allocations.items()
    }


def _place(allocation: relax.Call) -> tuple[int, str]:
    """Device index and memory scope."""
    _, _, device, scope = allocation.args
    return int(device), str(scope.value)


def _upper_bounds(function: relax.Function) -> sym.Analyzer:
    """What is known of the function's symbols: `tir_var_upper_bound` of its attributes."""
    bounds = dict((function.attrs or {}).get("tir_var_upper_bound", {}))
    analyzer = sym.Analyzer()
    for symbol in relax.analysis.defined_symbolic_vars(function):
        if symbol.name in bounds:
            analyzer.bind(symbol, ir.Range(0, int(bounds[symbol.name]) + 1))
    return analyzer


def _n_bytes(var: Var, most: sym.Analyzer) -> int:
    """The most that the tensor has."""
    n = var.ty.dtype.dtype.itemsize
    for dimension in var.ty.shape:
        largest = most.const_int_bound(dimension).max_value
        assert largest < sym.ConstIntBound.POS_INF, f"{var.ty}: no upper bound of {dimension}"
        n *= largest
    return int(n)


def _with_args(call: relax.Call, args: Sequence[Any]) -> relax.Call:
    return relax.Call(call.op, args, call.attrs, call.ty_args, ret_ty=call.ty)


def _calls(value: Any, name: str) -> bool:
    """Whether it is a call of the operator."""
    return getattr(getattr(value, "op", None), "name", "") == name
