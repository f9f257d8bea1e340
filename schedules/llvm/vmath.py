"""Vector maths in f32 without calls, `lanes` values at a time: exp, tanh, activation functions.

Every product that is added is an explicit fma, so that a function gives the same bits wherever it
is inlined.
"""

from __future__ import annotations

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.tir import Expr, T

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits: its product with an exponent is exact
_LN2_LOW = -2.12194440054690583e-4
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it leaves the rounded integer in the low bits
_ROUNDER_BITS = 0x4B400000
# (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2], highest power first (Cephes expf)
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# (tanh x - x) / x^3 in x^2 on [-0.625, 0.625], highest power first (Cephes tanhf)
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
_TANH_SMALL = 0.625


def exp(x: Expr, lanes: int = 1) -> Expr:
    """e^x, relative error below 2e-7; 0 and infinity beyond the range of f32, NaN for NaN."""

    def c(value: float) -> Expr:
        return tir.const(value, "float32", lanes)

    # The constant stands first: max and min of TIR give the second operand when one is NaN.
    x = tir.let(T.min(c(89.0), T.max(c(-104.0), x)))
    shifted = tir.let(tir.fma(x, c(_LOG2E), c(_ROUNDER), lanes))
    n = shifted - c(_ROUNDER)
    r = tir.fma(n, c(-_LN2_HIGH), x, lanes)
    r = tir.let(tir.fma(n, c(-_LN2_LOW), r, lanes))
    p = _horner(_EXP, r, lanes)
    p = tir.fma(p * r, r, r, lanes) + c(1.0)
    exponent = tir.let(tir.bits(shifted, "int32", lanes) - tir.const(_ROUNDER_BITS, "int32", lanes))
    # 2^n in two factors: n = 128 and the denormals have no f32 power of two of their own.
    half = tir.let(T.shift_right(exponent, tir.const(1, "int32", lanes)))
    return tir.let(p * _power_of_two(half, lanes) * _power_of_two(exponent - half, lanes))


def tanh(x: Expr, lanes: int = 1) -> Expr:
    """tanh x, relative error below 3e-7."""

    def c(value: float) -> Expr:
        return tir.const(value, "float32", lanes)

    x = tir.let(x)
    square = tir.let(x * x)
    small = tir.fma(_horner(_TANH, square, lanes) * square, x, x, lanes)
    large = c(1.0) - c(2.0) / (exp(x + x, lanes) + c(1.0))
    return tir.let(T.Select(_magnitude(x, lanes) < c(_TANH_SMALL), small, large))


def sigmoid(x: Expr, lanes: int = 1) -> Expr:
    """1 / (1 + e^-x)."""
    one = tir.const(1.0, "float32", lanes)
    return one / (one + exp(tir.const(0.0, "float32", lanes) - x, lanes))


def silu(x: Expr, lanes: int = 1) -> Expr:
    """x * sigmoid(x)."""
    x = tir.let(x)
    one = tir.const(1.0, "float32", lanes)
    return tir.let(x / (one + exp(tir.const(0.0, "float32", lanes) - x, lanes)))


def gelu_tanh(x: Expr, lanes: int = 1) -> Expr:
    """x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), as x * sigmoid(2 u)."""

    def c(value: float) -> Expr:
        return tir.const(value, "float32", lanes)

    x = tir.let(x)
    doubled = 1.5957691216057308  # 2 * sqrt(2 / pi)
    slope = tir.fma(x * x, c(0.044715 * doubled), c(doubled), lanes)
    return tir.let(x / (c(1.0) + exp((c(0.0) - x) * slope, lanes)))


def _horner(coefficients: tuple[float, ...], x: Expr, lanes: int) -> Expr:
    value = tir.const(coefficients[0], "float32", lanes)
    for coefficient in coefficients[1:]:
        value = tir.fma(value, x, tir.const(coefficient, "float32", lanes), lanes)
    return value


def _power_of_two(exponent: Expr, lanes: int) -> Expr:
    biased = exponent + tir.const(127, "int32", lanes)
    return tir.bits(T.shift_left(biased, tir.const(23, "int32", lanes)), "float32", lanes)


def _magnitude(x: Expr, lanes: int) -> Expr:
    mask = tir.const(0x7FFFFFFF, "int32", lanes)
    return tir.bits(tir.bits(x, "int32", lanes) & mask, "float32", lanes)
