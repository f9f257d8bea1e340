"""Vector maths against numpy in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_calls import build, call

from xpuc.schedules.llvm import tir, vmath

N = 40000
EXACT: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def apply(name: str, x: Any, lanes: int = 8) -> Any:
    def body() -> None:
        source = tir.arg("x", (len(x),), "float32")
        target = tir.arg("y", (len(x),), "float32")
        with tir.serial(0, len(x) // lanes) as i:
            value = getattr(vmath, name)(tir.load(source, i * lanes, lanes), lanes)
            tir.store(target, i * lanes, value, lanes)

    (y,) = call(build(tir.prim_func(name, body)), [x], [((len(x),), "float32")])
    return y


@pytest.mark.parametrize(("name", "bound"), [("exp", 2e-7), ("tanh", 3e-7), ("sigmoid", 2e-7)])
@pytest.mark.parametrize("reach", [1.0, 12.0, 87.0])
def test_relative_error(name: str, bound: float, reach: float) -> None:
    x = np.random.default_rng(0).uniform(-reach, reach, N).astype(np.float32)
    exact = EXACT[name](x.astype(np.float64))
    assert (np.abs(apply(name, x) - exact) / np.abs(exact)).max() < bound


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activations_are_exact_to_a_part_of_their_input(name: str) -> None:
    x = np.random.default_rng(0).uniform(-90, 90, N).astype(np.float32)
    x[: N // 2] /= 20
    exact = EXACT[name](x.astype(np.float64))
    assert (np.abs(apply(name, x) - exact) <= 4e-7 * np.maximum(np.abs(exact), 0.1)).all()


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("name", EXACT)
def test_the_ends_of_the_range(name: str, lanes: int) -> None:
    x = np.array([np.nan, 200, -200, 0, 1e-30, 88.7, -103, 3], np.float32)
    with np.errstate(over="ignore"):
        exact = EXACT[name](x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(apply(name, x, lanes), exact, rtol=3e-7, atol=3e-38)
