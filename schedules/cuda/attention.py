"""Attention of decoding rows on a GPU over the paged pool: the context is split among blocks.

A block of threads takes a work item (one segment of a row's context) of one head of the pool with
the query heads that share it; the last of a row's blocks merges its segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import tirx

from xpuc.schedules.attention_job import AttentionJob
from xpuc.schedules.cuda import pools, tir
from xpuc.schedules.cuda.attention_merge import NOTHING, Merge, Parts, merges_whole_blocks
from xpuc.schedules.cuda.pools import VECTOR, Place, Pool
from xpuc.schedules.cuda.quantize import Q8a
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T, Threads

_PARTS = 4  # warps that share the tokens of a segment: the order of its sums, so no knob
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
class DecodeKnobs:
    """How a segment is taken. No result depends on it.

    `warps` of a block: beyond 4, several take the same values, each for other queries; `splits`
    blocks have a head of the pool and an equal share of the queries each; `ahead` are the loads of
    16 bytes that a lane asks for before it uses the first: bytes in flight.
    """

    warps: int = _PARTS
    splits: int = 1
    ahead: int = 1

    def __post_init__(self) -> None:
        assert self.warps % _PARTS == 0, f"{self.warps} warps are not {_PARTS}, or 2, 3 times that"

    def shared_out(self, job: Attention) -> Attention:
        """The layer as blocks see it: each share of queries before a head of its own."""
        return replace(job, kv_heads=job.kv_heads * self.splits)


_DEFAULTS = DecodeKnobs()


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


def attention_decode(
    layer: Attention, n: int | None, *, quantize: bool, knobs: DecodeKnobs = _DEFAULTS
) -> tirx.PrimFunc:
    """Attention of rows each of which is a tile: tile i is row i.

    Arguments: q f32 (n, heads head_dim); positions i32 (n,); tiles i32 (t, 4) = (row, 1, first work
    item, work items), whose items are segments of the row's context, ascending, to its last; work
    i32 (w, 4) = (row, 1, sequence, segment), where 0 in place of 1 marks an item that is none;
    block_table i32 (s, max_blocks); the arrays of the pool; `arrived` i32 (n, kv_heads splits),
    zeros that are zeros again afterwards; outputs acc and ml (see `Parts`), then o f32 (n, heads
    head_dim), or its q8a with `quantize`, where `merges_whole_blocks` holds of what blocks see.
    Rows in no tile are left as they were.
    """
    job = knobs.shared_out(layer)
    assert not quantize or merges_whole_blocks(job), f"{job.name}: no whole blocks of q8a"
    assert job.segment_tokens % (16 * knobs.warps) == 0, f"{knobs.warps} warps, {job}"
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        hd, heads = job.head_dim, job.heads
        w = tir.rows_var("w")
        q = tir.arg("q", (rows, heads * hd), "float32")
        positions = tir.arg("positions", (rows,), "int32")
        tiles = tir.arg("tiles", (tir.rows_var("t"), 4), "int32")
        work = tir.arg("work", (w, 4), "int32")
        table = tir.arg("block_table", (tir.rows_var("s"), tir.rows_var("max_blocks")), "int32")
        pool = pools.declare(layer)
        arrived = tir.arg("arrived", (rows, job.kv_heads), "int32")
        acc = tir.arg("acc", (w, heads, hd), "float32")
        ml = tir.arg("ml", (w, heads, 2), "float32")
        width = heads * hd
        out = Q8a.declare(width, rows) if quantize else tir.arg("o", (rows, width), "float32")
        threads = tir.launch((job.kv_heads * w,), knobs.warps)  # another axis has 65535 at most
        block = threads.block[0]
        kv_head, item = tir.let(block % job.kv_heads), tir.let(block // job.kv_heads)
        with tir.when(work[item, 1] != 0):
            row, segment = tir.let(work[item, 0]), tir.let(work[item, 3])
            position = tir.let(positions[row])
            items = tir.let(tiles[row, 2]), tir.let(tiles[row, 3])
            first, count = _seen_items(job, items, work, position)
            with tir.when(item >= first):
                own = kv_head if knobs.splits == 1 else tir.let(kv_head // knobs.splits)
                context = Context(pool, table, tir.let(work[item, 2]), own)
                start = tir.let(segment * job.segment_tokens)
                split = _Split(job, knobs, threads, kv_head, context, start, position)
                split.read_queries(q, row)
                split.score()
                split.weigh(ml, item)
                split.add_values(acc, item)
                merge = Merge(job, threads, Parts(acc, ml, arrived), row, kv_head, first, count)
                with tir.when(merge.is_last()):
                    merge.write(split.scores, out)

    words = ["attention_decode", layer.name, *(["q8"] if quantize else []), f"r{n or 'n'}"]
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


@dataclass(frozen=True)
class _Turns:
    """What a lane does `count` times: `index(turn)` says with what, `counts(index)` whether.

    `nearest(index)` is one that is safe to load, the same where it counts.
    """

    count: int
    index: Callable[[Expr], Expr]
    counts: Callable[[Expr], Expr]
    nearest: Callable[[Expr], Expr]


class _Split:
    """A block of threads before one segment of one head, of a job that `shared_out` gave.

    queries  f32 (group, head_dim), shared
    scores   f32 (group, segment_tokens), shared: scores, then weights
    """

    def __init__(
        self, job: Attention, knobs: DecodeKnobs, threads: Threads, kv_head: Expr,
        context: Context, first: Expr, position: Expr,
    ) -> None:  # fmt: skip
        self.job, self.knobs, self.threads, self.context = job, knobs, threads, context
        self.kv_head = kv_head
        self.first, self.position = first, position
        self.low = tir.let(tir.maximum(0, position - job.window + 1)) if job.window else 0
        self.queries = tir.shared((job.group, job.head_dim), "float32")
        self.scores = tir.shared((job.group, job.segment_tokens), "float32")

    def _sees(self, token: Expr) -> Expr:
        return tirx.And(token <= self.position, token >= self.low)

    def read_queries(self, q: Buffer, row: Expr) -> None:
        """Into shared memory."""
        job, size = self.job, self.job.group * self.job.head_dim
        start = tir.let(self.kv_head * size)
        for first in range(0, size, self.threads.warps * WARP):
            i = tir.let(first + self.threads.thread)
            with tir.when(i < size):
                tir.store(self.queries, (i // job.head_dim, i % job.head_dim), q[row, start + i])
        tir.sync_block()

    def score(self) -> None:
        """Each warp takes 16 tokens at a time, two lanes a dimension with 8 tokens each."""
        job, lane = self.job, self.threads.lane
        side, d_lane = lane % 2, lane // 2
        for turn in range(0, job.segment_tokens, 16 * self.threads.warps):
            base = tir.let(turn + self.threads.warp * 16)
            token = tir.let(self.first + base)
            with tir.when(tirx.And(token <= self.position, token + 15 >= self.low)):
                place = self.context.place(token)
                place = place._replace(offset=tir.let(place.offset + side * VECTOR))
                sums = tir.registers(job.group * VECTOR, "float32")
                for i in range(job.group * VECTOR):
                    tir.store(sums, i, tir.const(0.0, "float32"))
                self._add_dots(sums, place, d_lane)
                for i in range(job.group * VECTOR):
                    for mask in (2, 4, 8, 16):
                        tir.store(sums, i, sums[i] + tir.shuffle_xor(sums[i], mask))
                with tir.when(d_lane == 0):
                    for g in range(job.group):
                        for t in range(VECTOR):
                            at = (g, base + side * VECTOR + t)
                            tir.store(self.scores, at, job.score(sums[g * VECTOR + t]))
        tir.sync_block()

    def _add_dots(self, sums: Buffer, place: Place, d_lane: Expr) -> None:
        """The products of a lane's dimensions, every 16th, with the keys of 8 tokens."""
        hd, pool = self.job.head_dim, self.context.pool

        def add(key: Buffer, d: Expr) -> None:
            for g in range(self.job.group):
                query = tir.let(self.queries[g, d])
                for t in range(VECTOR):
                    i = g * VECTOR + t
                    tir.store(sums, i, tir.fma(query, key[t], sums[i]))

        self._in_turn(
            _Turns(
                -(-hd // 16), lambda turn: turn * 16 + d_lane,
                counts=lambda d: d < hd, nearest=lambda d: tir.minimum(d, hd - 1),
            ),
            lambda into, d: pool.load_keys(into, place, d), add,
        )  # fmt: skip

    def _in_turn(
        self, turns: _Turns, load: Callable[[Buffer, Expr], None],
        use: Callable[[Buffer, Expr], None],
    ) -> None:  # fmt: skip
        """`use` what is loaded of the index of each turn that counts, in order."""
        ahead = min(self.knobs.ahead, turns.count)
        with tir.serial(0, -(-turns.count // ahead)) as step:
            indices = [tir.let(turns.index(step * ahead + i)) for i in range(ahead)]
            if ahead == 1:
                (index,) = indices
                with tir.when(turns.counts(index)):
                    loaded = tir.registers(VECTOR, "float32")
                    load(loaded, index)
                    use(loaded, index)
                return
            kept = "float16" if self.job.kv_dtype == "float16" else "float32"  # as it is stored
            waiting = [tir.registers(VECTOR, kept) for _ in indices]
            for index, loaded in zip(indices, waiting, strict=True):
                load(loaded, tir.let(turns.nearest(index)))  # no branch between two loads
            for index, loaded in zip(indices, waiting, strict=True):
                with tir.when(turns.counts(index)):
                    use(_widened(loaded), index)

    def weigh(self, ml: Buffer, item: Expr) -> None:
        """Scores into weights, a warp for each query; what the row does not see weighs nothing."""
        job, lane = self.job, self.threads.lane
        for first in range(0, job.group, self.threads.warps):
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
                    head = self.kv_head * job.group + g
                    tir.store(ml, (item, head, 0), top)
                    tir.store(ml, (item, head, 1), total)
        tir.sync_block()

    def add_values(self, acc: Buffer, item: Expr) -> None:
        """A lane takes 8 dimensions of a token; the parts of a query meet in shared memory."""
        job, lane, pool = self.job, self.threads.lane, self.context.pool
        lanes = job.head_dim // VECTOR  # of a token
        side_by_side = WARP // lanes
        parts = _PARTS * side_by_side
        mine = self._mine()
        sums = tir.registers(len(mine) * VECTOR, "float32")
        for i in range(len(mine) * VECTOR):
            tir.store(sums, i, tir.const(0.0, "float32"))
        at = tir.let(self.threads.warp * side_by_side + lane // lanes)
        part = at if self.sharing == 1 else tir.let(at % parts)
        d = tir.let(lane % lanes * VECTOR)

        def counts(t: Expr) -> Expr:
            inside = tirx.And(lane < lanes * side_by_side, t < job.segment_tokens)
            return tirx.And(inside, self._sees(self.first + t))

        def nearest(t: Expr) -> Expr:
            seen = tir.minimum(tir.maximum(self.first + t, self.low), self.position)
            return seen - self.first

        def load(into: Buffer, t: Expr) -> None:
            pool.load_values(into, self.context.place(self.first + t), d)

        def add(value: Buffer, t: Expr) -> None:
            for j, g in enumerate(mine):
                weight = tir.let(self.scores[g, t])
                for i in range(VECTOR):
                    s = j * VECTOR + i
                    tir.store(sums, s, tir.fma(weight, value[i], sums[s]))

        turns = -(-job.segment_tokens // parts)
        self._in_turn(_Turns(turns, lambda turn: turn * parts + part, counts, nearest), load, add)
        met = tir.shared((self.sharing * parts, job.head_dim), "float32")
        for j in range(len(mine)):
            with tir.when(lane < lanes * side_by_side):
                for i in range(VECTOR):
                    tir.store(met, (at, d + i), sums[j * VECTOR + i])
            tir.sync_block()
            self._store(acc, met, item, j, parts)
            tir.sync_block()

    @property
    def sharing(self) -> int:
        """Warps that take the values of the same tokens, every so many-th query each."""
        return self.threads.warps // _PARTS

    def _mine(self) -> list[Expr]:
        """The queries whose values this warp adds up; the last of all for one past them."""
        group, sharing = self.job.group, self.sharing
        if sharing == 1:
            return list(range(group))
        side = tir.let(self.threads.warp // _PARTS)
        own = (first + side for first in range(0, group, sharing))
        return [tir.let(tir.minimum(g, group - 1)) for g in own]

    def _store(self, acc: Buffer, met: Buffer, item: Expr, turn: int, parts: int) -> None:
        """What the warps side by side have of a query each."""
        hd, first_head = self.job.head_dim, self.kv_head * self.job.group
        count = min(self.sharing, self.job.group - turn * self.sharing)
        for first in range(0, count * hd, self.threads.warps * WARP):
            c = tir.let(first + self.threads.thread)
            with tir.when(c < count * hd):
                side, d = (0, c) if self.sharing == 1 else (tir.let(c // hd), tir.let(c % hd))
                total = met[side * parts, d]
                for part in range(1, parts):
                    total = total + met[side * parts + part, d]
                tir.store(acc, (item, first_head + turn * self.sharing + side, d), total)


def _widened(values: Buffer) -> Buffer:
    """Registers with the same in f32."""
    if str(values.dtype) == "float32":
        return values
    wide = tir.registers(VECTOR, "float32")
    for i in range(VECTOR):
        tir.store(wide, i, tir.cast(values[i], "float32"))
    return wide
