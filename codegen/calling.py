"""How the runtime calls an entry point: index inputs, the result to fill, one tuple of the rest.

The VM copies the arguments of a call twice into memory that it asks the system for. A step has
hundreds of operands that never change and one result: as one tuple that is made at load, and as
memory of the caller's, they cost a call nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import IRModule, relax, transform

Binding = Any
RESULT, OPERANDS = "result", "operands"


def result_given() -> Any:
    """The pass that makes the result of a step a parameter, before the pools.

    For modules whose storage is planned: a result is the one tensor that the plan leaves alone.
    """

    def given(function: relax.Function) -> relax.Function:
        bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
        found = function.body.body
        assert bound[found].op.name == "relax.builtin.alloc_tensor", "not a tensor of its own"
        result = relax.Var(RESULT, found.ty)
        n = first_pool(function)
        params = [*function.params[:n], result, *function.params[n:]]
        return _changed(
            function, params, lambda b: relax.VarBinding(b.var, result) if b.var == found else b
        )

    named = _of_steps("result_given", given)
    return transform.Sequential([named, relax.transform.CanonicalizeBindings()])


def operands_in_a_tuple() -> Any:
    """The pass that makes pools and planes one parameter.

    For modules that are done but for code generation: nothing frees or checks the tuple's items.
    """

    def joined(function: relax.Function) -> relax.Function:
        n = first_pool(function)
        operands = function.params[n:]
        pack = relax.Var(OPERANDS, relax.TupleType([p.ty for p in operands]))
        items = [relax.VarBinding(p, relax.TupleGetItem(pack, i)) for i, p in enumerate(operands)]
        return _changed(function, [*function.params[:n], pack], lambda b: b, items)

    return _of_steps("operands_in_a_tuple", joined)


def first_pool(function: relax.Function) -> int:
    """Which parameter of a step is the first of its pools; 0: it is no step."""
    names = [p.name for p in function.params]
    return next((i for i, name in enumerate(names) if name.startswith("keys.")), 0)


def _of_steps(name: str, change: Callable[[relax.Function], relax.Function]) -> Any:
    def changed(module: IRModule, _context: Any) -> IRModule:
        functions = {
            gv: change(f) if isinstance(f, relax.Function) and first_pool(f) else f
            for gv, f in module.functions_items()
        }
        return IRModule(functions, attrs=module.attrs)

    return transform.module_pass(changed, opt_level=0, name=name)


def _changed(
    function: relax.Function,
    params: Sequence[Any],
    change: Callable[[Binding], Binding],
    first: Sequence[Binding] = (),
) -> relax.Function:
    blocks = [
        relax.BindingBlock([change(b) for b in block.bindings]) for block in function.body.blocks
    ]
    body = relax.SeqExpr([relax.BindingBlock(list(first)), *blocks], function.body.body)
    return relax.Function(params, body, function.ret_ty, function.is_pure, function.attrs)
