"""What the definitions of kernels share: row counts, names, and weights read from packed bytes."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from xpuc.ir.formats import Format
from xpuc.ir.formats.access.expressions import ExpressionBlock

Expr = Any  # a TIR expression
Tensor = Any  # a TE tensor


def size(value: int | None, name: str) -> Expr:
    """A static size, or for None a symbolic one of that name."""
    return tirx.Var(name, "int64") if value is None else value


def f32(value: float) -> Expr:
    """A constant."""
    return tirx.const(value, "float32")


def full_name(kernel: str, n: int | None, *facts: str | float) -> str:
    """What a kernel for `n` rows is called.

    `facts` are all it was built from, so that a name tells kernels apart.
    """
    spelled = "_".join(str(fact) for fact in facts)
    symbol = spelled.replace(".", "p").replace("-", "m").replace("+", "")
    return f"portable_{kernel}_{symbol}_r{'n' if n is None else n}"


def kernel(name: str, *tensors: Tensor) -> tirx.PrimFunc:
    """The PrimFunc of a TE graph, given its inputs and then its outputs.

    Indices are int64: an embedding table passes 2^31 bytes in ordinary models.
    """
    func = te.create_prim_func(list(tensors), index_dtype_override="int64")
    return func.with_attr({"global_symbol": name, "tirx.noalias": True})


def weight(format: Format, w: Tensor, row: Expr, block: Expr, i: Expr) -> Expr:
    """Weight `i` of quant block `block` of row `row` of w uint8 (rows, row_bytes), as f32."""
    first = block * format.nbytes
    return format.decode(ExpressionBlock(lambda offset: w[row, first + offset]), i)
