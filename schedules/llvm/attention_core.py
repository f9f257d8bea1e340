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
    def name(self) -> str:
        """The part of a kernel's name that tells this layer from others."""
        words = [f"{self.heads}_{self.kv_heads}_{self.head_dim}", self.kv_dtype]
        words += [f"w{self.window}"] if self.window else []
        words += ["cap"] if self.softcap else []
        return "_".join(words)


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

    def fetch_keys(self, place: tuple[Expr, Expr], i: Expr) -> None:
        """Ask for the keys of a group at dimensions 2i and 2i + 1."""
        block, offset = place
        row_bytes = self.job.block_tokens * tir.size_of(self.job.kv_dtype)
        for d in range(0, 2, max(1, _LINE // row_bytes)):
            tir.prefetch(self.keys, (block, self.kv_head, 2 * i + d, offset))

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
    with tir.serial(span.g0, span.g1) as g:
        for v in range(vectors):
            t = tir.let(g * GROUP + v * lanes)
            score = tir.load(scores, base + t, lanes)
            if job.softcap is not None:
                inner = tir.const(job.scale / job.softcap, "float32", lanes)
                score = vmath.tanh(score * inner, lanes)
                tir.store(scores, base + t, score, lanes)
            score = T.min(score, _limit(job, span, t, position))
            tir.store(best, v * lanes, T.max(tir.load(best, v * lanes, lanes), score), lanes)
    top = reduce(T.max, [tir.load(best, v * lanes, lanes) for v in range(vectors)])
    largest = tir.fold_float(top, lanes, T.max)
    with tir.serial(span.g0, span.g1) as g:
        for v in range(vectors):
            t = tir.let(g * GROUP + v * lanes)
            # Not stored above: storing a score over itself where it is hidden makes a masked
            # store of it, which takes 12 cycles of an AMD core.
            score = T.min(tir.load(scores, base + t, lanes), _limit(job, span, t, position))
            difference = score - tir.splat(largest, lanes)
            weight = vmath.exp(difference * tir.const(job.factor, "float32", lanes), lanes)
            tir.store(scores, base + t, weight, lanes)
            tir.store(sums, v * lanes, tir.load(sums, v * lanes, lanes) + weight, lanes)
    total = tir.tree_sum([tir.load(sums, v * lanes, lanes) for v in range(vectors)])
    return largest, tir.fold_float(total, lanes, tir.add)


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
    shrink = vmath.exp(distance * tir.const(job.factor, "float32", lanes), lanes)
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
