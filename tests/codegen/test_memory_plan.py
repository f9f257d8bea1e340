"""Results take turns in few storages: never two at once, and no more of them in a deeper model."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import IRModule, ir, relax, transform

from xpuc.artifact import SUFFIXES, Tail
from xpuc.codegen import build, lower, memory_plan, target
from xpuc.codegen.memory_plan import Lifetime, Storage, assign
from xpuc.frontend.model import open_model
from xpuc.ir.builder import PoolLayout
from xpuc.passes import run
from xpuc.schedules import target_of
from xpuc.tune_db import TuneDb

PREFILL = {"n": 64, "t": 64, "w": 256, "m": 48}  # the most of each
DESTINATIONS = transform.Sequential(
    [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.CanonicalizeBindings(),
    ]
)


def lowered(gguf: Path, text: str = "llvm", tails: tuple[Tail, ...] = ("logits",)) -> IRModule:
    """Decode and prefill for a target, each for what it is to give of a row."""
    machine = target.resolve(text, "x86-64-v3" if text == "llvm" else None)
    kernels = target_of(machine.facts.kind)
    module, _ = open_model(gguf).graph(PoolLayout("float16", 16), tails)
    module, _ = run(module)
    plan = lower.Plan(
        machine.facts, kernels.SCHEDULES, kernels.planes, TuneDb(), 16, "float16", False
    )
    made = lower.Lowered(plan)
    for suffix in (SUFFIXES[tail] for tail in tails):
        lower.lower(made, module["decode" + suffix], "decode" + suffix, 1, {"t": 1, "w": 4})
        lower.lower(made, module["prefill" + suffix], "prefill" + suffix, None, PREFILL)
    return made.finish()


def values(function: relax.Function, name: str) -> dict[Any, Any]:
    """The calls of an operator, by what they are bound to."""
    return {
        b.var: b.value
        for block in function.body.blocks
        for b in block.bindings
        if getattr(getattr(b.value, "op", None), "name", "") == name
    }


def launches(function: relax.Function) -> list[Any]:
    calls = [b.value for block in function.body.blocks for b in block.bindings]
    return [c for c in calls if isinstance(getattr(c, "op", None), ir.GlobalVar)]


def most_bytes(ty: Any, bounds: Any) -> int:
    """Of a tensor, with each symbol at its bound."""
    shape = (int(bounds[str(d)]) if str(d) in bounds else int(d) for d in ty.shape)
    return math.prod(shape) * np.dtype(str(ty.dtype)).itemsize


def check_turns(planned: relax.Function, plain: relax.Function) -> None:
    """Go through the launches with, for each storage, the result that was written there last: every
    launch finds what the same one finds where each result has memory of its own."""
    own = values(plain, "relax.builtin.alloc_tensor")
    storages = values(planned, "relax.memory.alloc_storage")
    views = values(planned, "relax.memory.alloc_tensor")
    bounds = plain.attrs["tir_var_upper_bound"]
    for view, call in views.items():
        storage, offset, *_ = call.args
        assert int(offset) == 0
        assert most_bytes(view.ty, bounds) <= int(storages[storage].args[0].values[0])
    lies_in: dict[Any, Any] = {}
    written = set()
    for ours, theirs in zip(launches(planned), launches(plain), strict=True):
        assert ours.op.name_hint == theirs.op.name_hint
        operands = list(zip(ours.args, theirs.args, strict=True))
        planned_ones = [(views[a].args[0], a, b) for a, b in operands if a in views]
        for storage, _, result in planned_ones:
            if result not in written:  # it is this launch that writes it
                written.add(result)
                lies_in[storage] = result
        for storage, view, result in planned_ones:
            assert lies_in[storage].same_as(result), f"{ours.op.name_hint}: {result} is overwritten"
            assert str(view.ty) == str(result.ty)
        for a, b in operands:
            if a not in views and isinstance(b, relax.Var):
                assert a.name == ("result" if b in own else b.name)
    assert len(written) == len(own) - 1, "all but the function's result are planned"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "tails"), [("llvm", ("logits",)), ("cuda -arch=sm_90a", ("greedy", "sampled"))]
)
@pytest.mark.parametrize("row", ["llama", "gemma3_pattern"])
def test_every_launch_finds_what_was_written_for_it(
    row: str, text: str, tails: tuple[Tail, ...], tiny_model: Callable[..., Path]
) -> None:
    module = lowered(tiny_model(row, weights="Q8_0"), text, tails)
    plain = DESTINATIONS(module)
    planned, n_bytes = build.plan(module)
    for name, total in n_bytes.items():
        check_turns(planned[name], plain[name])
        sizes = values(planned[name], "relax.memory.alloc_storage").values()
        assert total == sum(int(call.args[0].values[0]) for call in sizes)


@pytest.mark.slow
def test_a_result_that_is_given_up_too_early_is_seen(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check above: here a launch may write over what it reads."""

    def early(lifetimes: list[Lifetime]) -> list[Storage]:
        return assign([dataclasses.replace(e, last=max(e.first, e.last - 1)) for e in lifetimes])

    module = lowered(tiny_model("llama", weights="Q8_0"))
    monkeypatch.setattr(memory_plan, "assign", early)
    damaged, _ = build.plan(module)
    with pytest.raises(AssertionError, match="is overwritten"):
        check_turns(damaged["prefill"], DESTINATIONS(module)["prefill"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "few"),
    # Gemma's sixth layer is the first without a window, and has rotations of its own. The last is
    # unlike those before it: behind its attention are the wanted rows only.
    [("llama", 2), ("gemma3_no_window", 3), ("gemma3", 6)],
)
def test_depth_costs_no_activations(row: str, few: int, tiny_model: Callable[..., Path]) -> None:
    module, small = build.plan(lowered(tiny_model(row, layers=few, weights="Q8_0")))
    deeper, large = build.plan(lowered(tiny_model(row, layers=24, weights="Q8_0")))
    assert small == large
    assert min(small.values()) > 0
    # And every layer is given the same tensors.
    for name in small:
        of_few, of_many = (values(m[name], "relax.memory.alloc_tensor") for m in (module, deeper))
        assert len(of_few) == len(of_many)


LIFETIMES = st.builds(
    lambda first, length, n_bytes, place: Lifetime(first, first + length, n_bytes, place),
    st.integers(0, 12), st.integers(0, 6), st.integers(1, 5), st.sampled_from(["device", "host"]),
)  # fmt: skip


@given(st.lists(LIFETIMES, max_size=24))
def test_results_of_a_storage_live_one_after_another(lifetimes: list[Lifetime]) -> None:
    placed = assign(lifetimes)
    of: dict[Storage, list[Lifetime]] = defaultdict(list)
    for life, storage in zip(lifetimes, placed, strict=True):
        of[storage].append(life)
    for storage, lives in of.items():
        assert storage.n_bytes == max(life.n_bytes for life in lives)
        assert {life.place for life in lives} == {storage.place}
        for a, b in combinations(lives, 2):
            assert not set(range(a.first, a.last + 1)) & set(range(b.first, b.last + 1))


def test_a_small_result_leaves_a_large_storage_to_a_large_one() -> None:
    """Though it is there first."""
    first, small, large = assign([Lifetime(0, 1, 100), Lifetime(2, 4, 10), Lifetime(2, 4, 90)])
    assert large is first
    assert (large.n_bytes, small.n_bytes) == (100, 10)
