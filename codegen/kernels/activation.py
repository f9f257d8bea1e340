"""Operations on elements of activations, all f32 (n, d)."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import te, tirx

from xpuc.codegen.kernels.definition import Expr, f32, full_name, kernel, size


def silu(d: int, n: int | None) -> tirx.PrimFunc:
    """x -> x * sigmoid(x)."""
    return _elementwise(full_name("silu", n, d), d, n, lambda x: x / (f32(1) + te.exp(-x)))


def gelu_tanh(d: int, n: int | None) -> tirx.PrimFunc:
    """x -> x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel)."""

    def gelu(x: Expr) -> Expr:
        inner = f32(math.sqrt(2 / math.pi)) * (x + f32(0.044715) * x * x * x)
        return f32(0.5) * x * (f32(1) + te.tanh(inner))

    return _elementwise(full_name("gelu_tanh", n, d), d, n, gelu)


def softcap(d: int, n: int | None, cap: float) -> tirx.PrimFunc:
    """x -> cap * tanh(x / cap)."""
    name = full_name("softcap", n, d, float(cap))
    return _elementwise(name, d, n, lambda x: f32(cap) * te.tanh(x / f32(cap)))


def add(d: int, n: int | None) -> tirx.PrimFunc:
    """x, y -> x + y."""
    return _elementwise(full_name("add", n, d), d, n, lambda x, y: x + y, "xy")


def mul(d: int, n: int | None) -> tirx.PrimFunc:
    """x, y -> x * y."""
    return _elementwise(full_name("mul", n, d), d, n, lambda x, y: x * y, "xy")


def _elementwise(
    name: str, d: int, n: int | None, value: Callable[..., Expr], inputs: str = "x"
) -> tirx.PrimFunc:
    shape = (size(n, "n"), d)
    operands = [te.placeholder(shape, "float32", letter) for letter in inputs]
    out = te.compute(shape, lambda r, c: value(*(x[r, c] for x in operands)), "out")
    return kernel(name, *operands, out)
