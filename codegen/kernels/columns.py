"""A weight vector applied to the columns of activations."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from xpuc.codegen.kernels.definition import Expr, full_name, kernel, size


def scale_columns(d: int, n: int | None, groups: int = 1) -> tirx.PrimFunc:
    """x f32 (n, groups * d), w f32 (d,) -> y of x's shape: each group of d columns times w."""
    return _by_column("scale_columns", d, n, groups, lambda x, w: x * w)


def add_columns(d: int, n: int | None, groups: int = 1) -> tirx.PrimFunc:
    """x f32 (n, groups * d), w f32 (d,) -> y of x's shape: each group of d columns plus w."""
    return _by_column("add_columns", d, n, groups, lambda x, w: x + w)


def _by_column(
    name: str, d: int, n: int | None, groups: int, value: Callable[[Expr, Expr], Expr]
) -> tirx.PrimFunc:
    x = te.placeholder((size(n, "n"), groups * d), "float32", "x")
    w = te.placeholder((d,), "float32", "w")
    y = te.compute(x.shape, lambda r, c: value(x[r, c], w[c % d]), "y")
    return kernel(full_name(name, n, f"{groups}x{d}"), x, w, y)
