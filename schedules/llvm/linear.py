"""y = x W^T + b on packed weights, for a group of weights that share their activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.isa import Isa
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.products import (
    LinearKnobs,
    Part,
    Product,
    Tile,
    Weight,
    activation_args,
    kernel_name,
    operand_args,
    side_by_side,
    tile_rows,
    tiles,
    turn_groups,
)
from xpuc.schedules.llvm.tir import Buffer, Expr


def linear(
    weights: tuple[Weight, ...],
    k: int,
    n: int | None,
    *,
    activation: str,
    bias: tuple[bool, ...],
    isa: Isa,
    knobs: LinearKnobs,
) -> tirx.PrimFunc:
    """The products of one activation with several weights, side by side.

    Arguments: q8a of (n, k), or x f32 (n, k) if `activation` is f32; each weight's planes; a bias
    f32 (rows,) for each weight that has one; output y f32 (n, sum of rows).
    """
    assert len(bias) == len(weights)
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = activation_args(activation, k, rows)
        operands = [operand_args(w, k, f"w{i}") for i, w in enumerate(weights)]
        biases = [
            tir.arg(f"b{i}", (w.rows,), "float32") if has else None
            for i, (w, has) in enumerate(zip(weights, bias, strict=True))
        ]
        y = tir.arg("y", (rows, sum(w.rows for w in weights)), "float32")
        product = Product(x, isa, knobs)
        count = side_by_side(rows, knobs)
        steps = [-(-o.groups // count) for o in operands]
        with tir.parallel(0, tir.long(max(steps))) as turn:
            size = tile_rows(rows, knobs.m_tile) * ROWS
            accs = [tir.scratch(size, "float32") for _ in range(count)]
            column = 0
            for operand, b, own in zip(operands, biases, steps, strict=True):
                out = Columns(y, column, operand.weight.rows, b)
                with share(own, turn, max(steps)) as step, tiles(rows, knobs.m_tile) as tile:
                    groups = turn_groups(operand.groups, step, count)
                    parts = [Part(operand, g, acc) for g, acc in zip(groups, accs, strict=True)]
                    product.emit(parts, tile)
                    for part in parts:
                        out.store(part.group, tile, part.acc)
                column += operand.weight.rows

    return tir.prim_func(kernel_name("linear", weights, k, n, activation), body)


@contextmanager
def share(steps: int, turn: Expr, turns: int) -> Iterator[Expr]:
    """The steps of a weight, each of some row groups, that belong to a turn of the parallel loop.

    The widest weight has one step in each turn and the others follow in proportion, so that
    threads get equal parts of every weight whatever its format costs.
    """
    if steps == turns:
        yield turn
        return
    first = tir.let(tir.floordiv(turn * steps, turns))
    last = tir.let(tir.floordiv((turn + 1) * steps, turns))
    with tir.serial(first, last) as step:
        yield step


@dataclass(frozen=True)
class Columns:
    """Columns [start, start + rows) of the result, those of one weight."""

    y: Buffer
    start: int
    rows: int
    bias: Buffer | None = None

    def store(self, group: Expr, tile: Tile, acc: Buffer) -> None:
        """Write a tile's accumulators of one row group."""
        tile.each(lambda i: self.store_row(group, tile.start + i, tir.load(acc, i * ROWS, ROWS)))

    def store_row(self, group: Expr, row: Expr, value: Expr) -> None:
        """Write 8 results of one row, leaving out those past the last weight row."""
        whole, rest = divmod(self.rows, ROWS)
        if not rest:
            self._store_lanes(group, row, value)
            return
        value = tir.let(value)
        with tir.when(group < whole):
            self._store_lanes(group, row, value)
        with tir.when(group == whole):
            for lane in range(rest):
                one, column = tir.shuffle(value, [lane]), whole * ROWS + lane
                if self.bias is not None:
                    one = one + tir.load(self.bias, column, 1)
                tir.store(self.y, (row, self.start + column), one, 1)

    def _store_lanes(self, group: Expr, row: Expr, value: Expr) -> None:
        column = group * ROWS
        if self.bias is not None:
            value = value + tir.load(self.bias, column, ROWS)
        tir.store(self.y, (row, self.start + column), value, ROWS)
