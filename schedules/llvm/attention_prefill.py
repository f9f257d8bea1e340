"""Attention of many rows: a tile of rows against one head of the pool, as small matrix products."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.attention_job import GROUP
from xpuc.schedules.llvm import tir
from xpuc.schedules.llvm.accumulators import Accumulators
from xpuc.schedules.llvm.attention_core import (
    NOTHING,
    Attention,
    AttentionKnobs,
    Context,
    Inputs,
    Span,
    join_values,
    merge,
    softmax,
    span_of,
)
from xpuc.schedules.llvm.pools import Place, Pool, Weights
from xpuc.schedules.llvm.tir import Buffer, Expr, T

_DEFAULTS = AttentionKnobs()
_TILE_QUERIES = 48  # rows x heads of a tile: its scores and sums stay in a 512 KiB cache


def tile_rows_for(heads: int, kv_heads: int, head_dim: int) -> int:
    """Rows of one sequence that a prefill tile takes at most."""
    return max(1, _TILE_QUERIES * kv_heads // heads)


# Rows of _Scratch.state: of the segments so far; of the present one; the factors of its merge.
_LARGEST, _TOTAL, _SEGMENT_LARGEST, _SEGMENT_TOTAL, _KEEP, _TAKE = range(6)


@dataclass(frozen=True)
class _Scratch:
    """A thread's buffers for one tile at a time, f32. Query m = row * group + head.

    Register tiles are of `queries` queries. `q` and `sums` hold head_dim values a query, `scores`
    segment_tokens, as do `weights`, the scores times a scale of the values; `state` has six rows of
    `pitch` queries; `panel` is one group of keys, or the values of one segment in one strip of
    columns.
    """

    queries: int
    pitch: int
    q: Buffer
    sums: Buffer
    scores: Buffer
    state: Buffer
    panel: Buffer
    weights: Buffer

    @staticmethod
    def declare(job: Attention, pool: Pool, rows: int, queries: int) -> _Scratch:
        """For tiles of at most `rows` rows, in whole register tiles and whole vectors."""
        whole = math.lcm(queries, job.lanes)
        pitch = -(-rows * job.group // whole) * whole
        panel = max(job.head_dim * GROUP, job.segment_tokens * _strip(job) * job.lanes)
        sizes = (pitch * job.head_dim, pitch * job.head_dim, pitch * job.segment_tokens, 6 * pitch)
        buffers = [tir.scratch(size, "float32") for size in (*sizes, panel)]
        buffers.append(pool.scaled(buffers[2], pitch * job.segment_tokens))
        return _Scratch(queries, pitch, *buffers)

    def at(self, row: int, m: Expr) -> Expr:
        """Where `state` holds row `row` of query m."""
        return row * self.pitch + m


@dataclass(frozen=True)
class _Tile:
    """The rows of one tile before one head of the pool."""

    job: Attention
    row: Expr
    rows: Expr
    position: Expr
    context: Context
    scratch: _Scratch

    @property
    def query_tiles(self) -> Expr:
        queries = self.scratch.queries
        return (self.rows * self.job.group + queries - 1) // queries


def attention_prefill(
    job: Attention,
    n: int | None,
    tile_rows: int | None = None,
    knobs: AttentionKnobs = _DEFAULTS,
) -> tirx.PrimFunc:
    """Causal attention of tiles of rows.

    Arguments: q f32 (n, heads head_dim); positions i32 (n,); tiles i32 (t, 4) = (first row, rows,
    first work item, work items) with at most `tile_rows` rows of consecutive positions; work i32
    (w, 4), whose third column is the sequence; block_table i32 (s, max_blocks); the pool; output o
    f32 (n, heads head_dim), zeros for rows in no tile.
    """
    rows = tir.rows_var() if n is None else n
    most = tile_rows or tile_rows_for(job.heads, job.kv_heads, job.head_dim)

    def body() -> None:
        width = job.heads * job.head_dim
        inputs = Inputs.declare(job, rows, tiled=True)
        out = tir.arg("o", (rows, width), "float32")
        with tir.each_row(rows, width) as row, tir.serial(0, width // job.lanes) as i:
            tir.store(out, (row, i * job.lanes), _zero(job.lanes), job.lanes)
        count = inputs.count
        # The first tile of a prompt sees the least and the last the most: one item takes both ends.
        with tir.parallel(0, (count + 1) // 2 * job.kv_heads) as index:
            end = tir.let(index // job.kv_heads)
            kv_head = tir.let(tir.cast(index % job.kv_heads, "int32"))
            scratch = _Scratch.declare(job, inputs.pool, most, knobs.tile_queries)
            with tir.serial(0, 2) as side:
                tile = tir.let(T.Select(side == 0, end, count - 1 - end))
                with tir.when(tirx.Or(side == 0, tile != end)):
                    _attend(_tile(job, inputs, (tile, kv_head), scratch), out, kv_head)

    return tir.prim_func(f"attention_prefill_{job.name}_t{most}_r{n or 'n'}", body)


def _zero(lanes: int) -> Expr:
    return tir.const(0.0, "float32", lanes)


def _strip(job: Attention) -> int:
    """Vectors of a value in one strip of columns."""
    return 2 if job.head_dim // job.lanes % 2 == 0 else 1


def _tile(job: Attention, inputs: Inputs, where: tuple[Expr, Expr], scratch: _Scratch) -> _Tile:
    """Tile `where[0]` with its queries of head `where[1]` copied together.

    Queries that fill up the last register tile are whatever the scratch held; nobody reads theirs.
    """
    tile, kv_head = where
    assert inputs.tiles is not None
    row, rows, first_work = (tir.let(inputs.tiles[tile, i]) for i in range(3))
    seq = tir.let(inputs.work[first_work, 2])
    context = inputs.context(job, seq, kv_head)
    position = tir.let(inputs.positions[row])
    span, lanes = job.group * job.head_dim, job.lanes
    with tir.serial(0, rows) as r, tir.serial(0, span // lanes) as i:
        value = tir.load(inputs.q, (row + r, kv_head * span + i * lanes), lanes)
        tir.store(scratch.q, r * span + i * lanes, value, lanes)
    with tir.serial(0, scratch.pitch * job.head_dim // lanes) as i:
        tir.store(scratch.sums, i * lanes, _zero(lanes), lanes)
    with tir.serial(0, scratch.pitch // lanes) as i:
        nothing = tir.const(NOTHING, "float32", lanes)
        tir.store(scratch.state, scratch.at(_LARGEST, i * lanes), nothing, lanes)
        tir.store(scratch.state, scratch.at(_TOTAL, i * lanes), _zero(lanes), lanes)
    return _Tile(job, row, rows, position, context, scratch)


def _attend(tile: _Tile, out: Buffer, kv_head: Expr) -> None:
    job = tile.job
    last = tir.let(tile.position + tile.rows - 1)
    start = T.max(0, tile.position - (job.window - 1)) if job.window else tirx.const(0, "int32")
    segments = (start // job.segment_tokens, last // job.segment_tokens + 1)
    with tir.serial(*segments) as segment:
        span = span_of(job, segment, tile.position, last)
        _dots(tile, span)
        with tir.serial(0, tile.rows) as r, tir.serial(0, job.group) as head:
            _weigh(tile, span, tir.let(r * job.group + head), tile.position + r)
        _merge(tile)
        _add_values(tile, span)
    with tir.serial(0, tile.rows) as r, tir.serial(0, job.group) as head:
        m = tir.let(r * job.group + head)
        inverse = tir.let(
            tir.const(1.0, "float32") / tile.scratch.state[tile.scratch.at(_TOTAL, m)]
        )
        with tir.serial(0, job.head_dim // job.lanes) as i:
            c = i * job.lanes
            value = tir.load(tile.scratch.sums, m * job.head_dim + c, job.lanes)
            column = (kv_head * job.group + head) * job.head_dim + c
            tir.store(out, (tile.row + r, column), value * tir.splat(inverse, job.lanes), job.lanes)


def _dots(tile: _Tile, span: Span) -> None:
    """The scores of every query with the groups of a segment."""
    job, queries, vectors = tile.job, tile.scratch.queries, GROUP // tile.job.lanes
    pool = tile.context.pool
    with tir.serial(span.g0, span.g1) as g:
        place = tile.context.place(span.first + g * GROUP)
        with tir.serial(0, job.head_dim) as d:
            for v in range(vectors):
                key = pool.key(place, d, v)
                tir.store(tile.scratch.panel, d * GROUP + v * job.lanes, key, job.lanes)
        with tir.serial(0, tile.query_tiles) as block:
            m = tir.let(block * queries)

            def add(dots: Accumulators, d: Expr, m: Expr = m) -> None:
                dots.add(
                    lambda i: tile.scratch.q[(m + i) * job.head_dim + d],
                    lambda v: tir.load(tile.scratch.panel, d * GROUP + v * job.lanes, job.lanes),
                )

            dots = pool.dots([place], queries, 1, add)
            for i in range(queries):
                for v in range(vectors):
                    t = (m + i) * job.segment_tokens + g * GROUP + v * job.lanes
                    tir.store(tile.scratch.scores, t, dots.value(i, v), job.lanes)


def _weigh(tile: _Tile, span: Span, m: Expr, position: Expr) -> None:
    """Scores of query m into weights."""
    job, scratch = tile.job, tile.scratch
    largest, total = softmax(job, scratch.scores, m * job.segment_tokens, span, position)
    tir.store(scratch.state, scratch.at(_SEGMENT_LARGEST, m), largest, 1)
    tir.store(scratch.state, scratch.at(_SEGMENT_TOTAL, m), total, 1)


def _merge(tile: _Tile) -> None:
    """How the segment joins the ones before, for a vector of queries at a time."""
    scratch, lanes = tile.scratch, tile.job.lanes
    with tir.serial(0, (tile.rows * tile.job.group + lanes - 1) // lanes) as i:
        rows = [scratch.at(row, i * lanes) for row in range(6)]
        state = [tir.load(scratch.state, row, lanes) for row in rows]
        step = merge(tile.job, state[_LARGEST], state[_SEGMENT_LARGEST], lanes)
        total = step.joined(state[_TOTAL], state[_SEGMENT_TOTAL])
        tir.store(scratch.state, rows[_TOTAL], total, lanes)
        tir.store(scratch.state, rows[_LARGEST], step.largest, lanes)
        tir.store(scratch.state, rows[_KEEP], step.keep, lanes)
        tir.store(scratch.state, rows[_TAKE], step.take, lanes)


def _weights(tile: _Tile, span: Span) -> Weights:
    """What the values of the segment are weighted with."""
    scratch, queries = tile.scratch, tile.rows * tile.job.group

    def place(g: Expr) -> Place:
        return tile.context.place(span.first + g * GROUP)

    groups = (span.g0, span.g1)
    return Weights(scratch.scores, scratch.weights, queries, tile.job.segment_tokens, groups, place)


def _add_values(tile: _Tile, span: Span) -> None:
    """The values of a segment, weighted, joined to the sums of every query."""
    job, queries, vectors = tile.job, tile.scratch.queries, _strip(tile.job)
    pool, width = tile.context.pool, vectors * job.lanes
    strips = pool.columns // width
    with pool.parts(_weights(tile, span)) as (part, weights), tir.serial(0, strips) as strip:
        column = tir.let((part * strips + strip) * width)
        with tir.serial(span.g0, span.g1) as g:
            place = tile.context.place(span.first + g * GROUP)
            with tir.serial(0, GROUP) as t:
                for v in range(vectors):
                    value = pool.value(place, t, column + v * job.lanes)
                    tir.store(
                        tile.scratch.panel,
                        (g * GROUP + t) * width + v * job.lanes,
                        value,
                        job.lanes,
                    )
        with tir.serial(0, tile.query_tiles) as block:
            m = tir.let(block * queries)
            sums = Accumulators(queries, vectors, job.lanes)
            # Up to the last token written: what lies behind it may be another sequence's.
            with tir.serial(span.g0 * GROUP, span.end) as t:
                sums.add(
                    lambda i: weights[(m + i) * job.segment_tokens + t],
                    lambda v: tir.load(tile.scratch.panel, t * width + v * job.lanes, job.lanes),
                )
            for i in range(queries):
                _join(tile, sums, (i, m + i), column)


def _join(tile: _Tile, sums: Accumulators, query: tuple[int, Expr], column: Expr) -> None:
    """Register row i of `sums` into columns of query m, where `query` is (i, m)."""
    i, m = query
    scratch, lanes = tile.scratch, tile.job.lanes
    keep, take = (tir.let(scratch.state[scratch.at(row, m)]) for row in (_KEEP, _TAKE))
    for v in range(sums.vectors):
        index = m * tile.job.head_dim + column + v * lanes
        before = tir.load(scratch.sums, index, lanes)
        joined = join_values(before, sums.value(i, v), (keep, take), lanes)
        tir.store(scratch.sums, index, joined, lanes)
