"""The gated half of a feed-forward block: h = act(x Wg^T) * (x Wu^T)."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK
from xpuc.schedules.llvm import tir, vmath
from xpuc.schedules.llvm.isa import Isa
from xpuc.schedules.llvm.linear import Columns
from xpuc.schedules.llvm.packing import ROWS
from xpuc.schedules.llvm.products import (
    LinearKnobs,
    Operand,
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
)
from xpuc.schedules.llvm.quantize import Q8a, emit_block, q8a_args
from xpuc.schedules.llvm.tir import Buffer, Expr

ACTS: dict[str, Callable[[Expr, int], Expr]] = {
    "silu": vmath.silu,
    "gelu_tanh": vmath.gelu_tanh,
}


def gate_up(
    gate: Weight,
    up: Weight,
    k: int,
    n: int | None,
    *,
    activation: str,
    act: str,
    quantize: bool,
    isa: Isa,
    knobs: LinearKnobs,
) -> tirx.PrimFunc:
    """h = act(x gate^T) * (x up^T), with `quantize` as q8a (then rows are whole blocks of 32).

    Arguments: q8a of (n, k), or x f32 (n, k) if `activation` is f32; the planes of gate, then of
    up; output h f32 (n, rows), or its q8a.
    """
    assert gate.rows == up.rows
    assert not quantize or gate.rows % Q8_BLOCK == 0, f"{gate.rows} rows are not whole blocks"
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        x = activation_args(activation, k, rows)
        pair = operand_args(gate, k, "gate"), operand_args(up, k, "up")
        gated = _Gated(Product(x, isa, knobs), pair, rows, ACTS[act])
        if quantize:
            gated.quantised(q8a_args(gate.rows, rows))
        else:
            gated.plain(tir.arg("h", (rows, gate.rows), "float32"))

    parts = ("gate_up", act, "q8") if quantize else ("gate_up", act)
    return tir.prim_func(kernel_name("_".join(parts), (gate, up), k, n, activation), body)


class _Gated:
    """Both products of a row group and what they make."""

    def __init__(
        self,
        product: Product,
        pair: tuple[Operand, Operand],
        rows: int | Expr,
        act: Callable[[Expr, int], Expr],
    ) -> None:
        self.product, self.pair, self.rows, self.act = product, pair, rows, act
        self.m_tile = product.knobs.m_tile
        self.size = tile_rows(rows, self.m_tile)

    def plain(self, h: Buffer) -> None:
        out = Columns(h, 0, self.pair[0].weight.rows)
        with tir.parallel(0, tir.long(self.pair[0].groups)) as group:
            accs = self._accumulators()
            with tiles(self.rows, self.m_tile) as tile:

                def store(i: Expr, value: Expr) -> None:
                    out.store_row(group, tile.start + i, value)

                self._group(group, tile, accs, store)

    def quantised(self, out: Q8a) -> None:
        """A turn makes the 32 values of a block for every row."""
        groups = Q8_BLOCK // ROWS
        with tir.parallel(0, tir.long(self.pair[0].groups // groups)) as block:
            accs = self._accumulators()
            h = tir.scratch(self.size * Q8_BLOCK, "float32")
            with tiles(self.rows, self.m_tile) as tile:
                with tir.serial(0, groups) as part:

                    def keep(i: Expr, value: Expr) -> None:
                        tir.store(h, i * Q8_BLOCK + part * ROWS, value, ROWS)

                    self._group(block * groups + part, tile, accs, keep)

                def emit(i: Expr) -> None:
                    values = [tir.load(h, i * Q8_BLOCK + c, ROWS) for c in range(0, Q8_BLOCK, ROWS)]
                    emit_block(values, out, block, tile.start + i)

                tile.each(emit)

    def _accumulators(self) -> tuple[Buffer, Buffer]:
        size = self.size * ROWS
        return tir.scratch(size, "float32"), tir.scratch(size, "float32")

    def _group(
        self,
        group: Expr,
        tile: Tile,
        accs: tuple[Buffer, Buffer],
        use: Callable[[Expr, Expr], None],
    ) -> None:
        parts = [Part(o, group, acc) for o, acc in zip(self.pair, accs, strict=True)]
        same = len({o.weight.format for o in self.pair}) == 1
        if same and side_by_side(self.rows, self.product.knobs) > 1:
            self.product.emit(parts, tile)
        else:
            for part in parts:
                self.product.emit([part], tile)

        def combine(i: Expr) -> None:
            gate, up = (tir.load(acc, i * ROWS, ROWS) for acc in accs)
            use(i, self.act(gate, ROWS) * up)

        tile.each(combine)
