"""The arithmetic of attention, which decode and prefill share so that a row gets the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

from tvm import tirx

from xpuc.schedules.llvm import tir, vmath
from xpuc.schedules.llvm.tir import Buffer, Expr, T

GROUP = 16  # tokens loaded together; a group never crosses a block of the pool
NOTHING = -1e30  # the maximum of no scores: finite, so that no difference of maxima is NaN
_LINE = 64  # bytes of a cache line
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
class Attention:
    """One attention layer over a paged pool.

    `window` is how many tokens a row sees, itself included (None: all); `softcap` bounds a score s
    to softcap * tanh(s / softcap). The context is cut in segments of `segment_tokens`: inside one,
    softmax has one maximum; segments are merged in ascending order.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_dtype: str = "float16"
    block_tokens: int = 16
    segment_tokens: int = 128
    lanes: int = 8

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.heads} heads over {self.kv_heads}"
        assert self.head_dim % self.lanes == 0, f"head size {self.head_dim}"
        assert self.block_tokens % GROUP == 0, f"blocks of {self.block_tokens} tokens"
        assert self.segment_tokens % GROUP == 0, f"segments of {self.segment_tokens} tokens"
        assert self.scale > 0

    @property
    def group(self) -> int:
        """Query heads that share one head of the pool."""
        return self.heads // self.kv_heads

    @property
    def factor(self) -> float:
        """What a difference of stored scores is multiplied with before exp."""
        return self.softcap or self.scale

    @property
    def keys_of_line(self) -> int:
        """Dimensions of a group's keys that share a cache line."""
        return max(1, _LINE // (self.block_tokens * tir.size_of(self.kv_dtype)))

    @property
    def key_lines(self) -> int:
        """Cache lines that hold a group's keys."""
        return self.head_dim // self.keys_of_line

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells this layer from others."""
        words = [f"{self.heads}_{self.kv_heads}_{self.head_dim}", self.kv_dtype]
        words += [f"w{self.window}"] if self.window else []
        words += ["cap"] if self.softcap else []
        return "_".join(words)


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
    keys: Buffer
    values: Buffer
    seq: Expr
    kv_head: Expr

    def place(self, token: Expr) -> tuple[Expr, Expr]:
        """The block of the pool that holds a group, and the offset of the group inside it."""
        block = self.block_table[self.seq, token // self.job.block_tokens]
        return tir.let(tir.cast(block, "int64")), tir.let(token % self.job.block_tokens)

    def key(self, place: tuple[Expr, Expr], d: Expr, v: int) -> Expr:
        """Vector v of dimension d of the keys of a group, in f32."""
        block, offset = place
        index = (block, self.kv_head, d, offset + v * self.job.lanes)
        return self._f32(tir.load(self.keys, index, self.job.lanes))

    def value(self, place: tuple[Expr, Expr], t: Expr, d: Expr) -> Expr:
        """The vector at dimension d of token t of a group's values, in f32."""
        block, offset = place
        return self._f32(
            tir.load(self.values, (block, self.kv_head, offset + t, d), self.job.lanes)
        )

    def fetch_keys(self, place: tuple[Expr, Expr], line: Expr) -> None:
        """Ask for cache line `line` of the `key_lines` of a group."""
        block, offset = place
        tir.prefetch(self.keys, (block, self.kv_head, line * self.job.keys_of_line, offset))

    def fetch_values(self, place: tuple[Expr, Expr], i: Expr) -> None:
        """Ask for as many of a group's values, which lie together, from the same share on."""
        block, offset = place
        for element in range(0, 2 * GROUP, _LINE // tir.size_of(self.job.kv_dtype)):
            index = (block, self.kv_head, offset, 2 * GROUP * i + element)
            tir.prefetch(self.values, index)

    def _f32(self, value: Expr) -> Expr:
        same = self.job.kv_dtype == "float32"
        return value if same else tir.cast(value, "float32", self.job.lanes)


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
    keys: Buffer
    values: Buffer

    @staticmethod
    def declare(job: Attention, rows: int | Expr, *, tiled: bool) -> Inputs:
        """Declare q, positions, tiles if `tiled`, work, block table and pools, in this order."""
        heads, hd, tokens = job.kv_heads, job.head_dim, job.block_tokens
        blocks, items, count = (tir.rows_var(name) for name in ("n_blocks", "w", "t"))
        table_shape = (tir.rows_var("s"), tir.rows_var("max_blocks"))
        return Inputs(
            tir.arg("q", (rows, job.heads * hd), "float32"),
            tir.arg("positions", (rows,), "int32"),
            count,
            tir.arg("tiles", (count, 4), "int32") if tiled else None,
            items,
            tir.arg("work", (items, 4), "int32"),
            tir.arg("block_table", table_shape, "int32"),
            tir.arg("keys", (blocks, heads, hd, tokens), job.kv_dtype),
            tir.arg("values", (blocks, heads, tokens, hd), job.kv_dtype),
        )

    def context(self, job: Attention, seq: Expr, kv_head: Expr) -> Context:
        """One head of one sequence."""
        return Context(job, self.block_table, self.keys, self.values, seq, kv_head)


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

    def value(self, i: int, v: int) -> Expr:
        """Register (i, v)."""
        return tir.load(self.registers, (i * self.vectors + v) * self.lanes, self.lanes)


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
