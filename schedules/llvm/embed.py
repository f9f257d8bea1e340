"""Token embeddings gathered from packed weights."""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.blocks import quads
from xpuc.schedules.llvm.isa import Generic
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.products import Operand, Weight, kernel_name, operand_args
from xpuc.schedules.llvm.tir import Buffer, Expr, T
from xpuc.schedules.packed import COLUMNS

_ISA = Generic()  # single rows are too short for the others


def embed(weight: Weight, k: int, n: int | None, scale: float) -> tirx.PrimFunc:
    """The rows of a packed matrix that the tokens name, times `scale`.

    Arguments: tokens int32 (n,), each in [0, rows); the weight's planes; output y f32 (n, k).
    """
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        tokens = tir.arg("tokens", (rows,), "int32")
        operand = operand_args(weight, k, "w")
        y = tir.arg("y", (rows, k), "float32")
        gather = _quantised if operand.layout.is_quantised else _plain
        with tir.each_row(rows, k) as row:
            token = tir.let(tir.cast(tir.load(tokens, row, 1), "int64"))
            first = tir.let(T.shift_right(token, tir.long(3)) * operand.blocks)
            gather(operand, (first, token & tir.long(ROWS - 1)), (y, row, scale))

    return tir.prim_func(kernel_name("embed", (weight,), k, n, "q8"), body)


Source = tuple[Expr, Expr]  # the first block of the token's row group, its row there
Target = tuple[Buffer, Expr, float]  # where the row goes, and its factor


def _quantised(operand: Operand, source: Source, target: Target) -> None:
    y, row, scale = target
    layout, first, lane = operand.layout, *source
    assert layout.sub_block is not None
    with tir.serial(0, operand.blocks) as block, tir.serial(0, layout.sub_blocks) as j:
        sub = layout.sub_block(operand.view(_ISA, first + block, 1, lane), j)
        column = block * layout.columns + j * COLUMNS
        for v, quad in enumerate(quads(sub)):
            tir.store(y, (row, column + 4 * v), _scaled(quad, scale, 4), 4)


def _plain(operand: Operand, source: Source, target: Target) -> None:
    y, row, scale = target
    value, first, lane = operand.layout.value, *source
    assert value is not None
    with tir.serial(0, operand.blocks) as column:
        one = value(operand.view(_ISA, first + column, 1, lane))
        tir.store(y, (row, column), _scaled(one, scale, 1), 1)


def _scaled(value: Expr, scale: float, lanes: int) -> Expr:
    return value if scale == 1.0 else value * tir.const(scale, "float32", lanes)
