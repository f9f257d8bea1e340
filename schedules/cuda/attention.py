"""Attention of decoding rows on a GPU over the paged pool: the context is split among blocks.

A block of threads takes a work item (one segment of a row's context) of one head of the pool with
the query heads that share it; the last of a row's blocks merges its segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.attention_job import AttentionJob
from xpuc.schedules.cuda import pools, tir
from xpuc.schedules.cuda.attention_merge import NOTHING, Merge, Parts, merges_whole_blocks
from xpuc.schedules.cuda.pools import VECTOR, Place, Pool
from xpuc.schedules.cuda.quantize import Q8a
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T, Threads

_WARPS = 4
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Attention(AttentionJob):
    """An attention layer whose heads a warp takes 8 dimensions a lane."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.head_dim % VECTOR == 0, f"head size {self.head_dim}"
        assert self.head_dim <= WARP * VECTOR, f"head size {self.head_dim}"

    def score(self, dot: Expr) -> Expr:
        """What a dot product counts, in powers of two: 2^(score - largest score) is its weight."""
        if self.softcap is None:
            return dot * tir.const(self.scale * _LOG2E, "float32")
        capped = T.tanh(dot * tir.const(self.scale / self.softcap, "float32"))
        return capped * tir.const(self.softcap * _LOG2E, "float32")


@dataclass(frozen=True)
class Context:
    """Where the keys and values of one sequence's head are found."""

    pool: Pool
    block_table: Buffer
    seq: Expr
    kv_head: Expr

    def place(self, token: Expr) -> Place:
        """Where a token lies in the pool."""
        tokens = self.pool.layer.block_tokens
        block = tir.let(self.block_table[self.seq, token // tokens])
        return Place(block, self.kv_head, tir.let(token % tokens))


def attention_decode(job: Attention, n: int | None, *, quantize: bool) -> tirx.PrimFunc:
    """Attention of rows each of which is a tile: tile i is row i.

    Arguments: q f32 (n, heads head_dim); positions i32 (n,); tiles i32 (t, 4) = (row, 1, first work
    item, work items), whose items are segments of the row's context, ascending, to its last; work
    i32 (w, 4) = (row, 1, sequence, segment), where 0 in place of 1 marks an item that is none;
    block_table i32 (s, max_blocks); the arrays of the pool; `arrived` i32 (n, kv_heads), zeros that
    are zeros again afterwards; outputs acc and ml (see `Parts`), then o f32 (n, heads head_dim), or
    its q8a with `quantize`, where `merges_whole_blocks` holds. Rows in no tile are left as they
    were.
    """
    assert not quantize or merges_whole_blocks(job), job
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        hd, heads = job.head_dim, job.heads
        w = tir.rows_var("w")
        q = tir.arg("q", (rows, heads * hd), "float32")
        positions = tir.arg("positions", (rows,), "int32")
        tiles = tir.arg("tiles", (tir.rows_var("t"), 4), "int32")
        work = tir.arg("work", (w, 4), "int32")
        table = tir.arg("block_table", (tir.rows_var("s"), tir.rows_var("max_blocks")), "int32")
        pool = pools.declare(job)
        arrived = tir.arg("arrived", (rows, job.kv_heads), "int32")
        acc = tir.arg("acc", (w, heads, hd), "float32")
        ml = tir.arg("ml", (w, heads, 2), "float32")
        width = heads * hd
        out = Q8a.declare(width, rows) if quantize else tir.arg("o", (rows, width), "float32")
        threads = tir.launch((job.kv_heads, w), _WARPS)
        kv_head, item = threads.block
        with tir.when(work[item, 1] != 0):
            row, segment = tir.let(work[item, 0]), tir.let(work[item, 3])
            position = tir.let(positions[row])
            items = tir.let(tiles[row, 2]), tir.let(tiles[row, 3])
            first, count = _seen_items(job, items, work, position)
            with tir.when(item >= first):
                context = Context(pool, table, tir.let(work[item, 2]), kv_head)
                start = tir.let(segment * job.segment_tokens)
                split = _Split(job, threads, context, start, position)
                split.read_queries(q, row)
                split.score()
                split.weigh(ml, item)
                split.add_values(acc, item)
                merge = Merge(job, threads, Parts(acc, ml, arrived), row, kv_head, first, count)
                with tir.when(merge.is_last()):
                    merge.write(split.scores, out)

    words = ["attention_decode", job.name, *(["q8"] if quantize else []), f"r{n or 'n'}"]
    return tir.prim_func("_".join(words), body)


def _seen_items(
    job: Attention, items: tuple[Expr, Expr], work: Buffer, position: Expr
) -> tuple[Expr, Expr]:
    """Of the items of a tile (first, number) those that hold a token the row sees."""
    if not job.window:
        return items
    first, count = items
    low = tir.maximum(0, position - job.window + 1) // job.segment_tokens
    unseen = tir.let(tir.maximum(0, low - work[first, 3]))
    return tir.let(first + unseen), tir.let(count - unseen)


class _Split:
    """A block of threads before one segment of one head.

    queries  f32 (group, head_dim), shared
    scores   f32 (group, segment_tokens), shared: scores, then weights
    """

    def __init__(
        self, job: Attention, threads: Threads, context: Context, first: Expr, position: Expr
    ) -> None:
        self.job, self.threads, self.context = job, threads, context
        self.first, self.position = first, position
        self.low = tir.let(tir.maximum(0, position - job.window + 1)) if job.window else 0
        self.queries = tir.shared((job.group, job.head_dim), "float32")
        self.scores = tir.shared((job.group, job.segment_tokens), "float32")

    def _sees(self, token: Expr) -> Expr:
        return tirx.And(token <= self.position, token >= self.low)

    def read_queries(self, q: Buffer, row: Expr) -> None:
        """Into shared memory."""
        job, size = self.job, self.job.group * self.job.head_dim
        start = tir.let(self.context.kv_head * size)
        for first in range(0, size, _WARPS * WARP):
            i = tir.let(first + self.threads.thread)
            with tir.when(i < size):
                tir.store(self.queries, (i // job.head_dim, i % job.head_dim), q[row, start + i])
        tir.sync_block()

    def score(self) -> None:
        """Each warp takes 16 tokens at a time, two lanes a dimension with 8 tokens each."""
        job, lane = self.job, self.threads.lane
        side, d_lane = lane % 2, lane // 2
        for turn in range(0, job.segment_tokens, 16 * _WARPS):
            base = tir.let(turn + self.threads.warp * 16)
            token = tir.let(self.first + base)
            with tir.when(tirx.And(token <= self.position, token + 15 >= self.low)):
                place = self.context.place(token)
                place = place._replace(offset=tir.let(place.offset + side * VECTOR))
                sums = tir.registers(job.group * VECTOR, "float32")
                for i in range(job.group * VECTOR):
                    tir.store(sums, i, tir.const(0.0, "float32"))
                with tir.serial(0, -(-job.head_dim // 16)) as step:
                    d = tir.let(step * 16 + d_lane)
                    with tir.when(d < job.head_dim):
                        self._add_dots(sums, place, d)
                for i in range(job.group * VECTOR):
                    for mask in (2, 4, 8, 16):
                        tir.store(sums, i, sums[i] + tir.shuffle_xor(sums[i], mask))
                with tir.when(d_lane == 0):
                    for g in range(job.group):
                        for t in range(VECTOR):
                            at = (g, base + side * VECTOR + t)
                            tir.store(self.scores, at, job.score(sums[g * VECTOR + t]))
        tir.sync_block()

    def _add_dots(self, sums: Buffer, place: Place, d: Expr) -> None:
        key = tir.registers(VECTOR, "float32")
        self.context.pool.load_keys(key, place, d)
        for g in range(self.job.group):
            query = tir.let(self.queries[g, d])
            for t in range(VECTOR):
                i = g * VECTOR + t
                tir.store(sums, i, tir.fma(query, key[t], sums[i]))

    def weigh(self, ml: Buffer, item: Expr) -> None:
        """Scores into weights, a warp for each query; what the row does not see weighs nothing."""
        job, lane = self.job, self.threads.lane
        for first in range(0, job.group, _WARPS):
            g = tir.let(first + self.threads.warp)
            with tir.when(g < job.group):
                tokens = [lane + t for t in range(0, job.segment_tokens, WARP)]
                seen = [self._sees(self.first + t) for t in tokens]
                scores = [
                    tir.let(tir.if_then_else(s, self.scores[g, t], tir.const(NOTHING, "float32")))
                    for s, t in zip(seen, tokens, strict=True)
                ]
                top = scores[0]
                for score in scores[1:]:
                    top = tir.maximum(top, score)
                top = tir.warp_reduce(top, "max")
                total: Expr = tir.const(0.0, "float32")
                for s, t, score in zip(seen, tokens, scores, strict=True):
                    weight = T.Select(s, tir.fast_exp2(score - top), tir.const(0.0, "float32"))
                    weight = tir.let(weight)
                    tir.store(self.scores, (g, t), weight)
                    total = tir.let(total + weight)
                total = tir.warp_reduce(total, "sum")
                with tir.when(lane == 0):
                    head = self.context.kv_head * job.group + g
                    tir.store(ml, (item, head, 0), top)
                    tir.store(ml, (item, head, 1), total)
        tir.sync_block()

    def add_values(self, acc: Buffer, item: Expr) -> None:
        """A lane takes 8 dimensions of a token; the parts of a query meet in shared memory."""
        job, lane = self.job, self.threads.lane
        lanes = job.head_dim // VECTOR  # of a token
        side_by_side = WARP // lanes
        parts = _WARPS * side_by_side
        sums = tir.registers(job.group * VECTOR, "float32")
        for i in range(job.group * VECTOR):
            tir.store(sums, i, tir.const(0.0, "float32"))
        part = tir.let(self.threads.warp * side_by_side + lane // lanes)
        d = tir.let(lane % lanes * VECTOR)
        with tir.serial(0, -(-job.segment_tokens // parts)) as step:
            t = tir.let(step * parts + part)
            inside = tirx.And(lane < lanes * side_by_side, t < job.segment_tokens)
            with tir.when(tirx.And(inside, self._sees(self.first + t))):
                value = tir.registers(VECTOR, "float32")
                self.context.pool.load_values(value, self.context.place(self.first + t), d)
                for g in range(job.group):
                    weight = tir.let(self.scores[g, t])
                    for i in range(VECTOR):
                        at = g * VECTOR + i
                        tir.store(sums, at, tir.fma(weight, value[i], sums[at]))
        met = tir.shared((parts, job.head_dim), "float32")
        for g in range(job.group):
            with tir.when(lane < lanes * side_by_side):
                for i in range(VECTOR):
                    tir.store(met, (part, d + i), sums[g * VECTOR + i])
            tir.sync_block()
            self._store(acc, met, item, g, parts)
            tir.sync_block()

    def _store(self, acc: Buffer, met: Buffer, item: Expr, g: int, parts: int) -> None:
        head = self.context.kv_head * self.job.group + g
        for first in range(0, self.job.head_dim, _WARPS * WARP):
            c = tir.let(first + self.threads.thread)
            with tir.when(c < self.job.head_dim):
                total = met[0, c]
                for part in range(1, parts):
                    total = total + met[part, c]
                tir.store(acc, (item, head, c), total)
