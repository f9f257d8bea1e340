"""Several matrices that one kernel multiplies x with: their products stand side by side in y."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import Buffer, Expr


class HasRows(Protocol):
    """A matrix, one of whose rows is a column of y."""

    @property
    def rows(self) -> int: ...


Rows = TypeVar("Rows", bound=HasRows)


@dataclass(frozen=True)
class Part(Generic[Rows]):
    """One of the matrices: it has `count` blocks from `first` on, columns of y from `column` on."""

    matrix: Rows
    bias: Buffer | None
    first: int
    count: int
    column: int

    def storing(self, y: Buffer, sums: Buffer) -> Callable[[Expr, Expr, int], None]:
        """Writes sum i, of a row of y and a row of the matrix, to y, plus its bias if any."""

        def one(row: Expr, column: Expr, i: int) -> None:
            value = sums[i] if self.bias is None else sums[i] + self.bias[column]
            tir.store(y, (row, self.column + column), value)

        return one


def side_by_side(
    matrices: Sequence[Rows], has_bias: Sequence[bool], block_rows: int
) -> list[Part[Rows]]:
    """The parts of a group whose blocks take `block_rows` rows of a matrix each.

    Declares the biases, f32 (rows,), as the next arguments of the kernel; `has_bias` is empty if
    there are none.
    """
    biases = [
        tir.arg(f"b{i}", (matrix.rows,), "float32") if has else None
        for i, (matrix, has) in enumerate(
            zip(matrices, has_bias or (False,) * len(matrices), strict=True)
        )
    ]
    parts: list[Part[Rows]] = []
    first = column = 0
    for matrix, bias in zip(matrices, biases, strict=True):
        count = -(-matrix.rows // block_rows)
        parts.append(Part(matrix, bias, first, count, column))
        first, column = first + count, column + matrix.rows
    return parts


def blocks_of(parts: Sequence[Part[Rows]]) -> int:
    """Of all of them."""
    return sum(part.count for part in parts)


@contextmanager
def when_within(block: Expr, first: int, count: int) -> Iterator[Expr]:
    """Inside, in `count` blocks from `first` on, which of them it is."""
    with tir.when(tirx.And(block >= first, block < first + count)):
        yield block - first
