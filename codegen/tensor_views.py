"""One tensor for each use of a stretch of planned storage, however many layers take turns with it.

The memory plan lets every layer reuse the same few storages, but each result is still made as a
tensor object of its own: 700 a step where 30 differ. A tensor here is only a view of its storage,
so the first of equal ones serves for all.
"""

from __future__ import annotations

from typing import Any

from tvm import IRModule, relax, transform


def share_tensor_views() -> Any:
    """The pass, for modules whose storage is planned."""

    def share(module: IRModule, _context: Any) -> IRModule:
        functions = {
            gv: _shared(f) if isinstance(f, relax.Function) else f
            for gv, f in module.functions_items()
        }
        return IRModule(functions, attrs=module.attrs)

    named = transform.module_pass(share, opt_level=0, name="share_tensor_views")
    return transform.Sequential([named, relax.transform.CanonicalizeBindings()])


def _shared(function: relax.Function) -> relax.Function:
    """The function with every later allocation of an equal view bound to the first one."""
    first: dict[tuple[Any, ...], Any] = {}

    def shared(binding: Any) -> Any:
        key = _view(binding.value)
        if key is None:
            return binding
        if key in first:
            return relax.VarBinding(binding.var, first[key])
        first[key] = binding.var
        return binding

    blocks = [
        relax.BindingBlock([shared(b) for b in block.bindings]) for block in function.body.blocks
    ]
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _view(value: Any) -> tuple[Any, ...] | None:
    """What an alloc_tensor of planned storage is a view of; None for anything else."""
    if getattr(getattr(value, "op", None), "name", "") != "relax.memory.alloc_tensor":
        return None
    storage, *rest = value.args
    return (storage, *map(str, rest))
