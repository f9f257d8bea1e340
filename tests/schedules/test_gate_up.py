"""The gated product against numpy, plain and quantised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from activations import q8a_shapes
from kernel_calls import build, call
from packed_weights import activation, packed, random_x, relative_error

from xpuc.schedules.llvm.gate_up import gate_up
from xpuc.schedules.llvm.isa import isa_for
from xpuc.schedules.llvm.products import LinearKnobs

AVX2 = isa_for(frozenset({"avx2", "fma"}))
ACTS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def kernel(pair: Any, n: int | None, kind: str, act: str, quantize: bool) -> Any:
    gate, up = (w.weight for w in pair)
    return build(
        gate_up(
            gate, up, 256, n,
            activation=kind, act=act, quantize=quantize, isa=AVX2, knobs=LinearKnobs(m_tile=8),
        )
    )  # fmt: skip


def matrices(rows: int) -> Any:
    return packed("Q5_0", rows, 256, 1), packed("Q4_K", rows, 256, 2)


@pytest.mark.parametrize(("act", "kind"), [("silu", "q8"), ("gelu_tanh", "f32")])
@pytest.mark.parametrize(("n", "rows"), [(1, 20), (None, 20)])
def test_it_is_the_gated_product(act: str, kind: str, n: int | None, rows: int) -> None:
    pair = matrices(rows)
    x = random_x(n or 19, 256)
    args, meant = activation(kind, x)
    planes = [p for w in pair for p in w.planes]
    (h,) = call(kernel(pair, n, kind, act, False), [*args, *planes], [((len(x), rows), "float32")])
    gate, up = (meant @ w.values.T for w in pair)
    assert relative_error(h, ACTS[act](gate) * up) < 1e-6


@pytest.mark.parametrize("n", [1, 3, None])
def test_quantised_is_the_same_rows_quantised(n: int | None) -> None:
    pair = matrices(64)
    count = n or 19
    x = random_x(count, 256)
    args, _ = activation("q8", x)
    args = [*args, *(p for w in pair for p in w.planes)]
    (h,) = call(kernel(pair, 1, "q8", "silu", False), one_row(args), [((1, 64), "float32")])
    got = call(kernel(pair, n, "q8", "silu", True), args, q8a_shapes(64, count))
    wanted, _ = activation("q8", h)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(g[:, :1], w)


def one_row(args: list[Any]) -> list[Any]:
    """The arguments for row 0 alone."""
    return [np.ascontiguousarray(a[:, :1]) for a in args[:4]] + args[4:]
