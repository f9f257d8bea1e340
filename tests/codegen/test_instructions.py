"""The instructions a named CPU's kernels are made of."""

from __future__ import annotations

import re

import pytest
from tvm import IRModule, tirx

from xpuc.codegen import lower, target
from xpuc.frontend.model import open_model
from xpuc.ir.builder import PoolLayout
from xpuc.passes import run
from xpuc.schedules import llvm
from xpuc.tune_db import TuneDb


def instructions(gguf, cpu: str) -> set[str]:
    """Of the projections of a decode step."""
    machine = target.resolve("llvm", cpu)
    module, _ = run(open_model(gguf).graph(PoolLayout("float16", 16))[0])
    plan = lower.Plan(machine.facts, llvm.SCHEDULES, llvm.planes, TuneDb(), 16, "float16", False)
    lowered = lower.Lowered(plan)
    lower.lower(lowered, module["decode"], "decode", 1, {"t": 1, "w": 4})
    kernels = {
        var: function.with_attr("global_symbol", var.name_hint)
        for var, function in lowered.finish().functions_items()
        if isinstance(function, tirx.PrimFunc) and var.name_hint.startswith("linear")
    }
    assert kernels
    built = tirx.build(IRModule(kernels), target=machine.tvm)
    return set(re.findall(r"^\s+(?:{vex}\s+)?(\w+)", built.inspect_source("asm"), re.MULTILINE))


@pytest.mark.parametrize(
    ("cpu", "used", "unused"),
    [
        ("x86-64-v2", {"pmaddwd", "pmulld", "pmullw"}, {"vpmaddubsw", "vpdpbusd", "vfmadd231ps"}),
        ("znver1", {"vpmaddubsw", "vpmaddwd"}, {"vpdpbusd"}),
        ("znver4", {"vpdpbusd"}, {"vpmaddubsw"}),
        ("sapphirerapids", {"vpdpbusd"}, {"vpmaddubsw"}),
        ("alderlake", {"vpdpbusd"}, {"vpmaddubsw"}),
    ],
)
@pytest.mark.slow
def test_a_cpu_gets_its_byte_products(cpu, used, unused, tiny_model):
    found = instructions(tiny_model("llama", layers=1, weights="Q4_0"), cpu)
    assert used & found
    assert not unused & found
