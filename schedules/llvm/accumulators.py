"""Sums kept in registers: a few queries by a few vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.tir import Expr


class Accumulators:
    """`queries` x `vectors` registers, each a chain of fma from zero in the order of `add`."""

    def __init__(self, queries: int, vectors: int, lanes: int) -> None:
        self.queries, self.vectors, self.lanes = queries, vectors, lanes
        self.registers = tir.scratch(queries * vectors * lanes, "float32")
        zero = tir.const(0.0, "float32", lanes)
        for i in range(queries * vectors):
            tir.store(self.registers, i * lanes, zero, lanes)

    def add(self, weight: Callable[[int], Expr], vector: Callable[[int], Expr]) -> None:
        """Add weight(i) * vector(v) to register (i, v)."""
        # The fewer operands wait in registers, the others pass through one.
        by_query = self.queries > self.vectors
        weights = partial(self._weight, weight)
        first, second = (vector, weights) if by_query else (weights, vector)
        counts = (self.vectors, self.queries) if by_query else (self.queries, self.vectors)
        held = [tir.let(first(j)) for j in range(counts[0])]
        for k in range(counts[1]):
            passing = tir.let(second(k))
            for j in range(counts[0]):
                i, v = (k, j) if by_query else (j, k)
                total = tir.fma(held[j], passing, self.value(i, v), self.lanes)
                tir.store(self.registers, (i * self.vectors + v) * self.lanes, total, self.lanes)

    def _weight(self, weight: Callable[[int], Expr], i: int) -> Expr:
        return tir.splat(weight(i), self.lanes)

    def scale_into(self, totals: Accumulators, scale: Callable[[int], Expr]) -> None:
        """Add register (i, v) times scale(v) to that of `totals`."""
        for v in range(self.vectors):
            factor = tir.let(scale(v))
            for i in range(self.queries):
                total = tir.fma(self.value(i, v), factor, totals.value(i, v), self.lanes)
                tir.store(totals.registers, (i * self.vectors + v) * self.lanes, total, self.lanes)

    def value(self, i: int, v: int) -> Expr:
        """Register (i, v)."""
        return tir.load(self.registers, (i * self.vectors + v) * self.lanes, self.lanes)
