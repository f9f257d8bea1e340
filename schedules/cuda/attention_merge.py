"""The segments of a decoding row's attention merged by the block that comes last to them.

Blocks leave what their segment gives in global memory and count themselves; who completes the count
reads what all have left, in ascending order, so that no bit depends on who that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xpuc.ir.activation import Q8_BLOCK
from xpuc.schedules.attention_job import AttentionJob
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.quantize import Q8a
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, Threads

NOTHING = -1e30  # the maximum of no scores: finite, so that no difference of maxima is NaN


def merges_whole_blocks(job: AttentionJob) -> bool:
    """Whether the columns of a K/V head's queries are whole blocks of q8a."""
    return job.group * job.head_dim % Q8_BLOCK == 0


@dataclass(frozen=True)
class Parts:
    """What the work items of a call give, and how many of a row's are there.

    acc      f32 (w, heads, head_dim): the weighted sum of values
    ml       f32 (w, heads, 2): the largest score, and the sum of weights
    arrived  i32 (n, kv_heads): zeros before a call and after it
    """

    acc: Buffer
    ml: Buffer
    arrived: Buffer


@dataclass(frozen=True)
class Merge:
    """A block of threads before one head of the pool of one row: `count` items from `first` on.

    `scores` is shared memory, f32 (group, segment_tokens), that the block is done with.
    """

    job: AttentionJob
    threads: Threads
    parts: Parts
    row: Expr
    kv_head: Expr
    first: Expr
    count: Expr

    def is_last(self) -> Expr:
        """Count this block, whose part is written; whether it is the last of the row's."""
        flag = tir.shared(1, "int32")
        at = (self.row, self.kv_head)
        tir.sync_block()
        with tir.when(self.threads.thread == 0):
            before = tir.let(tir.arrive(self.parts.arrived, at))
            last = tir.let(before == self.count - 1)
            tir.store(flag, 0, tir.cast(last, "int32"))
            with tir.when(last):
                tir.store(self.parts.arrived, at, tir.const(0, "int32"))
        tir.sync_block()
        return flag[0] != 0

    def write(self, scores: Buffer, out: Buffer | Q8a) -> None:
        """The row of o, quantised if `out` is; a warp takes 32 columns."""
        job = self.job
        columns = [(b, self._column(b)) for b in self._blocks()]
        sums = tir.registers(len(columns), "float32")
        for i in range(len(columns)):
            tir.store(sums, i, tir.const(0.0, "float32"))
        tops, weights = (tir.shared(job.group, "float32") for _ in range(2))
        self._find_tops(tops)
        chunk = job.segment_tokens
        with tir.serial(0, (self.count + chunk - 1) // chunk) as turn:
            start = tir.let(turn * chunk)
            n = tir.let(tir.minimum(self.count - start, chunk))
            tir.sync_block()
            self._share_out(scores, (start, n), tops, weights)
            tir.sync_block()
            with tir.serial(0, n) as i:
                for s, (_, c) in enumerate(columns):
                    g = c // job.head_dim
                    item, head = self.first + start + i, self.kv_head * job.group + g
                    part = self.parts.acc[item, head, c % job.head_dim]
                    tir.store(sums, s, tir.fma(scores[g, i], part, sums[s]))
        for s, (block, column) in enumerate(columns):
            value = tir.let(sums[s] / weights[column // job.head_dim])
            self._store(out, block, value)

    def _blocks(self) -> Iterator[Expr]:
        """Those of 32 columns that are this warp's."""
        n = -(-self.job.group * self.job.head_dim // Q8_BLOCK)
        for first in range(0, n, self.threads.warps):
            yield tir.let(first + self.threads.warp)

    def _column(self, block: Expr) -> Expr:
        """This lane's of a block, of the columns of the head of the pool; the last past the end."""
        last = self.job.group * self.job.head_dim - 1
        return tir.let(tir.minimum(block * Q8_BLOCK + self.threads.lane, last))

    def _of_each_query(self) -> Iterator[Expr]:
        """The query heads that are this warp's, inside each."""
        for first in range(0, self.job.group, self.threads.warps):
            g = tir.let(first + self.threads.warp)
            with tir.when(g < self.job.group):
                yield g

    def _find_tops(self, tops: Buffer) -> None:
        """The largest score of each query."""
        top = tir.registers(1, "float32")
        for g in self._of_each_query():
            tir.store(top, 0, tir.const(NOTHING, "float32"))
            with tir.serial(0, (self.count + WARP - 1) // WARP) as turn:
                item = tir.let(tir.minimum(turn * WARP + self.threads.lane, self.count - 1))
                tir.store(top, 0, tir.maximum(top[0], self._ml(item, g)[0]))
            largest = tir.warp_reduce(top[0], "max")
            with tir.when(self.threads.lane == 0):
                tir.store(tops, g, largest)

    def _share_out(
        self, scores: Buffer, items: tuple[Expr, Expr], tops: Buffer, weights: Buffer
    ) -> None:
        """What each of `items` (first, number) counts, and add up what they weigh."""
        start, n = items
        for g in self._of_each_query():
            total: Expr = tir.if_then_else(start == 0, tir.const(0.0, "float32"), weights[g])
            for first in range(0, self.job.segment_tokens, WARP):
                i = tir.let(first + self.threads.lane)
                top, weight = self._ml(tir.minimum(start + i, self.count - 1), g)
                share = tir.let(tir.fast_exp2(top - tops[g]))
                tir.store(scores, (g, i), share)
                counted = tir.if_then_else(i < n, share * weight, tir.const(0.0, "float32"))
                total = tir.let(total + tir.warp_reduce(counted, "sum"))
            tir.sync_warp()
            with tir.when(self.threads.lane == 0):
                tir.store(weights, g, total)

    def _ml(self, item: Expr, g: Expr) -> tuple[Expr, Expr]:
        head = self.kv_head * self.job.group + g
        pair = tir.let(tir.load(self.parts.ml, (self.first + item, head, 0), 2))
        return tir.element(pair, 0), tir.element(pair, 1)

    def _store(self, out: Buffer | Q8a, block: Expr, value: Expr) -> None:
        job = self.job
        width = job.group * job.head_dim
        if isinstance(out, Q8a):
            blocks = width // Q8_BLOCK
            with tir.when(block < blocks):
                at = tir.let(self.kv_head * blocks + block)
                out.store_block(value, at, self.row, self.threads.lane)
            return
        column = tir.let(block * Q8_BLOCK + self.threads.lane)
        with tir.when(column < width):
            tir.store(out, (self.row, self.kv_head * width + column), value)
