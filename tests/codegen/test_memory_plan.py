"""What a step allocates does not grow with the depth of the model."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from xpuc.codegen import build, lower, target
from xpuc.frontend.model import open_model
from xpuc.ir.builder import PoolLayout
from xpuc.passes import run
from xpuc.schedules import llvm
from xpuc.tune_db import TuneDb

CHUNK = 64


def planned(gguf: Any) -> tuple[Any, dict[str, int]]:
    """The planned module of a model's decode and prefill, and the bytes each allocates."""
    module, _ = open_model(gguf).graph(PoolLayout("float16", 16))
    module, _ = run(module)
    facts = target.resolve("llvm", "x86-64-v3").facts
    plan = lower.Plan(facts, llvm.SCHEDULES, llvm.planes, TuneDb(), 16, "float16", False)
    lowered = lower.Lowered(plan)
    lower.lower(lowered, module["decode"], "decode", 1, {"t": 1, "w": 4})
    bounds = {"n": CHUNK, "t": CHUNK, "w": 4 * CHUNK, "m": 64}
    lower.lower(lowered, module["prefill"], "prefill", None, bounds)
    return build.plan(lowered.finish())


def tensors(module: Any, name: str) -> int:
    found = 0

    def visit(expr: Any) -> None:
        nonlocal found
        called = getattr(getattr(expr, "op", None), "name", "")
        found += called == "relax.memory.alloc_tensor"

    relax.analysis.post_order_visit(module[name], visit)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_depth_costs_no_activations(arch, tiny_model):
    module, small = planned(tiny_model(arch, layers=7, weights="Q8_0"))
    deeper, large = planned(tiny_model(arch, layers=24, weights="Q8_0"))
    assert small == large
    assert min(small.values()) > 0
    # Layers take turns with few storages, in a pattern that ends before the seventh.
    assert tensors(deeper, "decode") <= tensors(module, "decode") + 4
    assert tensors(deeper, "prefill") <= tensors(module, "prefill") + 4
