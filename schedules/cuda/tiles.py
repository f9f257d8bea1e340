"""Tiles of y = x W^T that a block of threads makes by mma, each of its warps a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import Expr, Threads


@dataclass(frozen=True)
class TileKnobs:
    """The sides of a tile, and the warps along each. No result depends on them."""

    rows: int
    columns: int
    row_warps: int
    column_warps: int

    def __post_init__(self) -> None:
        whole = self.rows % (16 * self.row_warps) == 0 == self.columns % (16 * self.column_warps)
        assert whole, f"{self.rows}x{self.columns} is no whole tiles of 16 for each warp"

    @property
    def warps(self) -> int:
        return self.row_warps * self.column_warps

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a warp has."""
        return self.rows // self.row_warps // 16

    @property
    def column_tiles(self) -> int:
        """Tiles of 8 columns that a warp has, in pairs."""
        return self.columns // self.column_warps // 8

    @property
    def sums(self) -> int:
        """Elements of the tile that a thread has: 4 of each product of 16 rows and 8 columns."""
        return 4 * self.row_tiles * self.column_tiles


class Tile:
    """A block of threads before its tile, from row `first` of the n of y on.

    A warp's part starts `row` rows and `column` columns into it.
    """

    row: Expr
    column: Expr

    def __init__(self, n: Expr, knobs: TileKnobs, threads: Threads) -> None:
        self.n, self.tiles, self.threads = n, knobs, threads
        self.first = tir.let(threads.block[1] * knobs.rows)

    def each(self, start: Expr, end: int, visit: Callable[[Expr, Expr, int], None]) -> None:
        """`visit(row of y, row of the matrix, sum)` for all that this thread has made."""
        lane, tiles = self.threads.lane, self.tiles.column_tiles
        for m in range(self.tiles.row_tiles):
            for half in range(2):
                row = tir.let(self.first + self.row + 16 * m + 8 * half + lane // 4)
                with tir.when(row < self.n):
                    for t in range(tiles):
                        for c in range(2):
                            column = tir.let(start + self.column + 8 * t + lane % 4 * 2 + c)
                            with tir.when(column < end):
                                visit(row, column, 4 * (m * tiles + t) + 2 * half + c)
