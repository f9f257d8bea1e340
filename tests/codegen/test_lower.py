"""Lowering: kernels are shared by what they are, not by what they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xpuc.codegen.compile import Options, operations
from xpuc.codegen.kernels.activation import silu, softcap
from xpuc.codegen.lower import Lowered, Plan
from xpuc.schedules import TargetFacts
from xpuc.tune_db import TuneDb


def lowered() -> Lowered:
    facts = TargetFacts("llvm", "generic", frozenset())
    return Lowered(Plan(facts, (), lambda *_: (), TuneDb(), 16, "float16", False))


def named(kernel: Any, name: str) -> Any:
    return kernel.with_attr("global_symbol", name)


def test_equal_kernels_are_one_function() -> None:
    module = lowered()
    once, again = module.add_kernel(silu(8, 4)), module.add_kernel(silu(8, 4))
    assert once.same_as(again)
    assert len(module.finish().functions) == 1


def test_kernels_of_one_name_stay_apart() -> None:
    module = lowered()
    low, high = (module.add_kernel(named(softcap(8, 4, cap), "softcap_8")) for cap in (5.0, 9.0))
    assert (low.name_hint, high.name_hint) == ("softcap_8", "softcap_81")
    assert len(module.finish().functions) == 2


def launches(checkpoint: Path) -> dict[str, int]:
    """Of a decode step on a GPU, by operation."""
    found, _ = operations(checkpoint, Options(target="cuda -arch=sm_90a", ctx=64, untuned=True))
    counts: dict[str, int] = {}
    for o in found:
        counts[o["op"]] = counts.get(o["op"], 0) + o["uses"].get("decode", 0) * len(o["kernels"])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_layer_takes_eight_launches_of_a_gpu(name: str, tiny_model: Callable[..., Path]) -> None:
    one, two = (launches(tiny_model(name, layers=layers, weights="Q4_0")) for layers in (1, 2))
    assert sum(two.values()) - sum(one.values()) == 8
    assert one["zeros"] == two["zeros"] == 1


@pytest.mark.slow
def test_what_the_last_layer_does_for_wanted_rows_is_no_other_operation(
    tiny_model: Callable[..., Path],
) -> None:
    options = Options(ctx=64, max_batch=1, untuned=True)
    found, _ = operations(tiny_model("llama", layers=3, weights="Q8_0"), options)
    uses = {o["name"]: o["uses"].get("prefill") for o in found}
    assert len(uses) == len(found)
    assert [n for name, n in uses.items() if name.startswith("gate_up") and n] == [3]
