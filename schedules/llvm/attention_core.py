"""The arithmetic of attention, which decode and prefill share so that a row gets the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from tvm import tirx

from xpuc.schedules.attention_job import GROUP, AttentionJob
from xpuc.schedules.llvm import pools, tir, vmath
from xpuc.schedules.llvm.pools import Place, Pool
from xpuc.schedules.llvm.tir import Buffer, Expr, T

NOTHING = -1e30  # the maximum of no scores: finite, so that no difference of maxima is NaN
_LOG2E = 1.4426950408889634
_NO_WEIGHT = -127.0  # 2^-127 has the exponent bits 0 and counts as 0
_ROUNDER = 12582912.0 + 127.0  # 1.5 * 2^23: adding it rounds, and leaves the exponent bits lowest
# (2^f - 1) / f on [-1/2, 1/2], highest power first (Cephes exp2f)
_POWER = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)


@dataclass(frozen=True)
class Attention(AttentionJob):
    """An attention layer on a core whose vectors are of `lanes` f32."""

    lanes: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        pools.check(self)

    @property
    def factor(self) -> float:
        """What a difference of stored scores is multiplied with before exp."""
        return self.softcap or self.scale


@dataclass(frozen=True)
class AttentionKnobs:
    """How attention uses a core. No result depends on it.

    `chains`: chains of fma that the dot products of decode keep going, groups side by side where
    queries are few. `fetch_keys`, `fetch_values`: whether (1, 0) decode asks for the next groups'
    keys and for the segment's values while it takes dot products. `fetch_next`: the bytes of keys
    up to which it asks, while it adds values, for the keys of its next work item. `tile_queries`:
    queries of one register tile of prefill.
    """

    chains: int = 12
    fetch_keys: int = 1
    fetch_values: int = 1
    fetch_next: int = 32768
    tile_queries: int = 6


@dataclass(frozen=True)
class Context:
    """Where the keys and values of one sequence's head are found."""

    job: Attention
    block_table: Buffer
    pool: Pool
    seq: Expr
    kv_head: Expr

    def place(self, token: Expr) -> Place:
        """Where a group lies in the pool."""
        block = self.block_table[self.seq, token // self.job.block_tokens]
        block = tir.let(tir.cast(block, "int64"))
        return Place(block, self.kv_head, tir.let(token % self.job.block_tokens))


@dataclass(frozen=True)
class Inputs:
    """What attention kernels read: `work` i32 (items, 4), in prefill `tiles` i32 (count, 4)."""

    q: Buffer
    positions: Buffer
    count: Expr
    tiles: Buffer | None
    items: Expr
    work: Buffer
    block_table: Buffer
    pool: Pool

    @staticmethod
    def declare(job: Attention, rows: int | Expr, *, tiled: bool) -> Inputs:
        """Declare q, positions, tiles if `tiled`, work, block table and pool, in this order."""
        items, count = (tir.rows_var(name) for name in ("w", "t"))
        table_shape = (tir.rows_var("s"), tir.rows_var("max_blocks"))
        return Inputs(
            tir.arg("q", (rows, job.heads * job.head_dim), "float32"),
            tir.arg("positions", (rows,), "int32"),
            count,
            tir.arg("tiles", (count, 4), "int32") if tiled else None,
            items,
            tir.arg("work", (items, 4), "int32"),
            tir.arg("block_table", table_shape, "int32"),
            pools.declare(job),
        )

    def context(self, job: Attention, seq: Expr, kv_head: Expr) -> Context:
        """One head of one sequence."""
        return Context(job, self.block_table, self.pool, seq, kv_head)


@dataclass(frozen=True)
class Span:
    """The part of a segment that rows at positions `low` to `high` see.

    Tokens [first + GROUP * g0, first + end) in groups [g0, g1).
    """

    first: Expr
    g0: Expr
    g1: Expr
    end: Expr


def span_of(job: Attention, segment: Expr, low: Expr, high: Expr) -> Span:
    """The part of `segment` in the context of consecutive rows."""
    first = tir.let(segment * job.segment_tokens)
    start = T.max(0, low - (job.window - 1) - first) if job.window else tirx.const(0, "int32")
    end = tir.let(T.min(job.segment_tokens, high + 1 - first))
    return Span(first, tir.let(start // GROUP), tir.let((end + GROUP - 1) // GROUP), end)


def softmax(
    job: Attention, scores: Buffer, base: Expr, span: Span, position: Expr
) -> tuple[Expr, Expr]:
    """Turn the dot products of one query with a segment into weights, in place.

    `scores[base + t]` belongs to token span.first + t. Returns the largest score and the sum of
    the weights exp(score - largest); tokens the row does not see get the weight 0 and change
    neither. Scores are compared before they are scaled: scaling a difference leaves the compiler no
    product to contract with the subtraction.
    """
    lanes, vectors = job.lanes, GROUP // job.lanes
    best, sums = tir.scratch(GROUP, "float32"), tir.scratch(GROUP, "float32")
    for v in range(vectors):
        tir.store(best, v * lanes, tir.const(NOTHING, "float32", lanes), lanes)
        tir.store(sums, v * lanes, tir.const(0.0, "float32", lanes), lanes)
    stretches = _stretches(job, span, position)
    for g0, g1, seen in stretches:
        with tir.serial(g0, g1) as g:
            for v in range(vectors):
                t = tir.let(g * GROUP + v * lanes)
                score = tir.load(scores, base + t, lanes)
                if job.softcap is not None:
                    inner = tir.const(job.scale / job.softcap, "float32", lanes)
                    score = vmath.tanh(score * inner, lanes)
                    tir.store(scores, base + t, score, lanes)
                score = score if seen else T.min(score, _limit(job, span, t, position))
                tir.store(best, v * lanes, T.max(tir.load(best, v * lanes, lanes), score), lanes)
    top = reduce(T.max, [tir.load(best, v * lanes, lanes) for v in range(vectors)])
    largest = tir.fold_float(top, lanes, T.max)
    for g0, g1, seen in stretches:
        with tir.serial(g0, g1) as g:
            for v in range(vectors):
                t = tir.let(g * GROUP + v * lanes)
                # Not stored above: storing a score over itself where it is hidden makes a masked
                # store of it, which takes 12 cycles of an AMD core.
                score = tir.load(scores, base + t, lanes)
                score = score if seen else T.min(score, _limit(job, span, t, position))
                weight = _weight(job, score - tir.splat(largest, lanes), lanes)
                tir.store(scores, base + t, weight, lanes)
                tir.store(sums, v * lanes, tir.load(sums, v * lanes, lanes) + weight, lanes)
    total = tir.tree_sum([tir.load(sums, v * lanes, lanes) for v in range(vectors)])
    return largest, tir.fold_float(total, lanes, tir.add)


def _stretches(job: Attention, span: Span, position: Expr) -> list[tuple[Expr, Expr, bool]]:
    """(first group, end, whether a row sees all of their tokens): the groups in ascending order."""
    own = position - span.first
    end = tir.let(T.max(span.g0, T.min(span.g1, (own + 1) // GROUP)))
    after = (end, span.g1, False)
    if not job.window:
        return [(span.g0, end, True), after]
    start = (own - job.window + GROUP) // GROUP
    start = tir.let(T.max(span.g0, T.min(end, start)))
    return [(span.g0, start, False), (start, end, True), after]


def _weight(job: Attention, difference: Expr, lanes: int) -> Expr:
    """exp(difference * factor) of a difference <= 0: relative error below 1e-6 where it counts.

    As a power of two; from 2^-126.5 down it is exactly 0. NaN for NaN.
    """

    def c(value: float) -> Expr:
        return tir.const(value, "float32", lanes)

    scale = job.factor * _LOG2E
    # The constant stands first: the maximum of TIR is the second operand when one is NaN.
    x = tir.let(T.max(c(_NO_WEIGHT / scale), difference))
    shifted = tir.let(tir.fma(x, c(scale), c(_ROUNDER), lanes))
    f = tir.let(tir.fma(x, c(scale), c(_ROUNDER) - shifted, lanes))
    power = c(_POWER[0])
    for coefficient in (*_POWER[1:], 1.0):
        power = tir.fma(power, f, c(coefficient), lanes)
    exponent = T.shift_left(tir.bits(shifted, "int32", lanes), tir.const(23, "int32", lanes))
    return tir.let(power * tir.bits(exponent, "float32", lanes))


def _limit(job: Attention, span: Span, t: Expr, position: Expr) -> Expr:
    """What scores are at most: nothing where the row sees the token, minus infinity where not.

    The minimum of a NaN and a limit is the limit, so what lies in unwritten slots does not matter.
    """
    tokens = tirx.Ramp(span.first + t, 1, job.lanes)
    seen = tokens <= tir.splat(position, job.lanes)
    if job.window:
        seen = tirx.And(seen, tokens > tir.splat(position - job.window, job.lanes))
    infinity, lanes = float("inf"), job.lanes
    return T.Select(
        seen, tir.const(infinity, "float32", lanes), tir.const(-infinity, "float32", lanes)
    )


@dataclass(frozen=True)
class Merge:
    """How a segment joins the ones before it: result = before * keep + segment * take.

    `lanes` queries at a time, or one.
    """

    largest: Expr
    keep: Expr
    take: Expr
    lanes: int

    def joined(self, before: Expr, segment: Expr) -> Expr:
        """The sums of weights."""
        return tir.fma(segment, self.take, before * self.keep, self.lanes)


def merge(job: Attention, before: Expr, segment: Expr, lanes: int = 1) -> Merge:
    """The merge of two largest scores. One of the two factors is exactly 1."""
    before, segment = tir.let(before), tir.let(segment)
    one = tir.const(1.0, "float32", lanes)
    distance = T.min(before - segment, segment - before)
    shrink = _weight(job, distance, lanes)
    return Merge(
        tir.let(T.Select(segment > before, segment, before)),
        tir.let(T.Select(segment > before, shrink, one)),
        tir.let(T.Select(segment > before, one, shrink)),
        lanes,
    )


def join_values(before: Expr, segment: Expr, factors: tuple[Expr, Expr], lanes: int) -> Expr:
    """A vector of one query's weighted values; `factors` are keep and take of its merge."""
    keep, take = (tir.splat(f, lanes) for f in factors)
    return tir.fma(segment, take, before * keep, lanes)
