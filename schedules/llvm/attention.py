"""Attention over the paged pool: decode splits the context among threads, prefill the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from xpuc.ir.activation import Q8_BLOCK
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
from xpuc.schedules.llvm.attention_prefill import attention_prefill, tile_rows_for
from xpuc.schedules.llvm.pools import Place, Pool, Weights
from xpuc.schedules.llvm.quantize import Q8a, emit_block, q8a_args
from xpuc.schedules.llvm.tir import Buffer, Expr, T

__all__ = ["attention_prefill", "attention_reduce", "attention_split", "tile_rows_for"]

_DEFAULTS = AttentionKnobs()
Places = Sequence[Place]
REGISTERS = 12  # accumulators that fit beside their operands in 16 vector registers


def _rows(n: int | None) -> int | Expr:
    return tir.rows_var() if n is None else n


@dataclass(frozen=True)
class _Segment:
    """One row before one segment of one head of the pool: row `row` of q, work item `item`."""

    item: Expr
    row: Expr
    position: Expr
    span: Span
    context: Context


def _segment(job: Attention, inputs: Inputs, index: Expr) -> _Segment:
    """The heads of an item lie beside each other in memory and follow each other here."""
    item, kv_head = tir.let(index // job.kv_heads), tir.let(index % job.kv_heads)
    row = tir.let(inputs.work[item, 0])
    position = tir.let(inputs.positions[row])
    span = span_of(job, inputs.work[item, 3], position, position)
    context = inputs.context(job, tir.let(inputs.work[item, 2]), kv_head)
    return _Segment(item, row, position, span, context)


def attention_split(
    job: Attention, n: int | None, knobs: AttentionKnobs = _DEFAULTS
) -> tirx.PrimFunc:
    """Attention of single rows to single segments.

    Arguments: q f32 (n, heads head_dim); positions i32 (n,); work i32 (w, 4) = (row, 1, sequence,
    segment); block_table i32 (s, max_blocks); the pool; outputs acc f32 (w, heads, head_dim), the
    sum of weighted values, and ml f32 (w, heads, 2), the largest score and the sum of the weights.
    """
    rows = _rows(n)

    def body() -> None:
        inputs = Inputs.declare(job, rows, tiled=False)
        key_bytes = job.segment_tokens * job.head_dim * inputs.pool.item_bytes
        ahead = key_bytes <= knobs.fetch_next
        acc = tir.arg("acc", (inputs.items, job.heads, job.head_dim), "float32")
        ml = tir.arg("ml", (inputs.items, job.heads, 2), "float32")
        count = inputs.items * job.kv_heads
        with tir.parallel(0, count) as index:
            here = _segment(job, inputs, index)
            # A thread's items follow each other: all but its last are followed by one of its own.
            following = _segment(job, inputs, tir.let(T.min(index + 1, count - 1)))
            portions = list(_portions(job))
            for first, queries in portions:
                head = tir.let(here.context.kv_head * job.group + first)
                beside = max(1, knobs.chains // (queries * (GROUP // job.lanes)))
                scores = _Scores(inputs.pool, queries, job.segment_tokens + (beside - 1) * GROUP)
                fetches = bool(knobs.fetch_keys), bool(knobs.fetch_values) and first == 0
                _dots(here, inputs.q, head, scores, beside, fetches)
                with tir.serial(0, queries) as i:
                    largest, total = softmax(
                        job, scores.buffer, i * scores.pitch, here.span, here.position
                    )
                    tir.store(ml, (here.item, head + i, 0), largest, 1)
                    tir.store(ml, (here.item, head + i, 1), total, 1)
                last = (first, queries) == portions[-1]
                _weighted_values(here, scores, acc, head, following if ahead and last else None)

    return tir.prim_func(f"attention_split_{job.name}_r{n or 'n'}", body)


class _Scores:
    """The scores, then the weights, of some queries with a segment: query i from i * pitch on."""

    def __init__(self, pool: Pool, queries: int, pitch: int) -> None:
        self.queries, self.pitch = queries, pitch
        self.buffer = tir.scratch(queries * pitch, "float32")
        self.scaled = pool.scaled(self.buffer, queries * pitch)

    def weights(self, here: _Segment) -> Weights:
        """What the values of the segment are weighted with."""
        span = here.span

        def place(g: Expr) -> Place:
            return here.context.place(span.first + g * GROUP)

        groups = (span.g0, span.g1)
        return Weights(self.buffer, self.scaled, self.queries, self.pitch, groups, place)


def _portions(job: Attention) -> Iterator[tuple[int, int]]:
    """(first, count): the queries of a group in equal portions that fit the registers."""
    group = job.group
    portions = -(-group * (GROUP // job.lanes) // REGISTERS)
    for i in range(portions):
        first = i * group // portions
        yield first, (i + 1) * group // portions - first


def _dots(
    here: _Segment,
    q: Buffer,
    head: Expr,
    scores: _Scores,
    beside: int,
    fetches: tuple[bool, bool],
) -> None:
    """The dot products of some heads of one row with the keys of a segment.

    Few queries are few chains of fma: `beside` groups side by side keep the multipliers busy.
    `fetches`: whether to ask for the keys of the next step, and for the values of this one.
    """
    span, context, job = here.span, here.context, here.context.job
    pool, vectors = context.pool, GROUP // job.lanes
    width = max(2, pool.keys_of_line)
    with tir.serial(0, (span.g1 - span.g0 + beside - 1) // beside) as step:
        g = tir.let(span.g0 + step * beside)
        # A group past the end is read as the last one again; nobody reads its scores.
        groups = [tir.let(T.min(g + j, span.g1 - 1)) for j in range(2 * beside)]
        places = [context.place(span.first + group * GROUP) for group in groups]
        now, later = places[:beside], places[beside:]
        _fetch_scales(pool, now, later, fetches)

        def add(dots: Accumulators, part: Expr, now: Places = now, later: Places = later) -> None:
            _fetch(pool, now, later, fetches, (part, width))
            for d in (width * part + i for i in range(width)):
                dots.add(
                    partial(lambda d, i: q[here.row, (head + i) * job.head_dim + d], d),
                    partial(lambda d, v: pool.key(now[v // vectors], d, v % vectors), d),
                )

        dots = pool.dots(now, scores.queries, width, add)
        for i in range(scores.queries):
            for v in range(dots.vectors):
                t = i * scores.pitch + g * GROUP + v * job.lanes
                tir.store(scores.buffer, t, dots.value(i, v), job.lanes)


def _fetch_scales(pool: Pool, now: Places, later: Places, fetches: tuple[bool, bool]) -> None:
    """Ask for the scales of the keys of the next step, and of the values of this one."""
    if fetches[0]:
        for place in later:
            pool.fetch_key_scales(place)
    if fetches[1]:
        for place in now:
            pool.fetch_value_scales(place)


def _fetch(
    pool: Pool, now: Places, later: Places, fetches: tuple[bool, bool], part: tuple[Expr, int]
) -> None:
    """Ask for a part of the keys of the next step, and as many of the values of this one.

    `part` is its number and its dimensions.
    """
    number, width = part
    for place, next_place in zip(now, later, strict=True):
        if fetches[0]:
            for line in range(width // pool.keys_of_line):
                pool.fetch_keys(next_place, number * width // pool.keys_of_line + line)
        if fetches[1]:
            pool.fetch_values(place, number, width)


def _weighted_values(
    here: _Segment, scores: _Scores, acc: Buffer, head: Expr, following: _Segment | None
) -> None:
    """The values of a segment, weighted for some heads of one row.

    Meanwhile memory is asked for the keys of the `following` segment.
    """
    span, context, job = here.span, here.context, here.context.job
    pool, vectors = context.pool, _most_vectors(context, scores.queries)
    width = vectors * job.lanes
    chunks, chunks_of_part = job.head_dim // width, pool.columns // width
    lines = -(-pool.key_lines // (chunks * GROUP))
    with (
        pool.parts(scores.weights(here)) as (part, buffer),
        tir.serial(0, chunks_of_part) as chunk_of_part,
    ):
        chunk = part * chunks_of_part + chunk_of_part
        start = tir.let(chunk * vectors * job.lanes)
        sums = Accumulators(scores.queries, vectors, job.lanes)
        with tir.serial(span.g0, span.g1) as g:
            place = context.place(span.first + g * GROUP)
            later = [] if following is None else [_group_of(following, g)]
            for group in later:
                pool.fetch_key_scales(group, chunk, chunks)
            # Not one token further: what lies there is another sequence's, or was never written.
            with tir.serial(0, T.min(GROUP, span.end - g * GROUP)) as t:
                for group in later:
                    for i in range(lines):
                        pool.fetch_keys(group, (chunk * GROUP + t) * lines + i)
                sums.add(
                    lambda i: buffer[i * scores.pitch + g * GROUP + t],
                    lambda v: pool.value(place, t, start + v * job.lanes),
                )
        for i in range(scores.queries):
            for v in range(vectors):
                index = (here.item, head + i, start + v * job.lanes)
                tir.store(acc, index, sums.value(i, v), job.lanes)


def _group_of(segment: _Segment, g: Expr) -> Place:
    """The place of group `g` of a segment, or of its last one."""
    group = tir.let(T.min(g, segment.span.g1 - 1))
    return segment.context.place(segment.span.first + group * GROUP)


def _most_vectors(context: Context, queries: int) -> int:
    """How many vectors of a value to take at a time."""
    whole = context.pool.columns // context.job.lanes
    return max(v for v in range(1, whole + 1) if whole % v == 0 and v * queries <= REGISTERS)


def attention_reduce(job: Attention, n: int | None, *, quantize: bool = False) -> tirx.PrimFunc:
    """Merge the segments of every row.

    Arguments: acc f32 (w, heads, head_dim) and ml f32 (w, heads, 2) of `attention_split`; tiles i32
    (t, 4) = (row, 1, first work item, work items); output o f32 (n, heads head_dim), or its q8a
    with `quantize`. Rows in no tile become zeros.
    """
    rows, width = _rows(n), job.heads * job.head_dim

    def body() -> None:
        items, count = tir.rows_var("w"), tir.rows_var("t")
        acc = tir.arg("acc", (items, job.heads, job.head_dim), "float32")
        ml = tir.arg("ml", (items, job.heads, 2), "float32")
        tiles = tir.arg("tiles", (count, 4), "int32")
        out = q8a_args(width, rows) if quantize else tir.arg("o", (rows, width), "float32")
        with tir.each_row(rows, width) as row:
            _clear(out, row, width, job.lanes)
        with tir.serial(0, count) if n == 1 else tir.parallel(0, count) as tile:
            row, first, last = tiles[tile, 0], tiles[tile, 2], tiles[tile, 2] + tiles[tile, 3]
            row, first, last = (tir.let(x) for x in (row, first, last))
            if isinstance(out, Q8a):
                merged = tir.scratch(width, "float32")
                with tir.serial(0, width // job.lanes) as i:
                    tir.store(merged, i * job.lanes, _zero(job.lanes), job.lanes)
                _merge_row(job, (acc, ml), (first, last), merged, None)
                with tir.serial(0, width // Q8_BLOCK) as block:
                    starts = [block * Q8_BLOCK + i for i in range(0, Q8_BLOCK, job.lanes)]
                    values = [tir.load(merged, c, job.lanes) for c in starts]
                    emit_block(values, out, block, row, job.lanes)
            else:
                _merge_row(job, (acc, ml), (first, last), out, row)

    words = ["attention_reduce", job.name, *(["q8"] if quantize else []), f"r{n or 'n'}"]
    return tir.prim_func("_".join(words), body)


def _zero(lanes: int) -> Expr:
    return tir.const(0.0, "float32", lanes)


def _clear(out: Buffer | Q8a, row: Expr, width: int, lanes: int) -> None:
    if not isinstance(out, Q8a):
        with tir.serial(0, width // lanes) as i:
            tir.store(out, (row, i * lanes), _zero(lanes), lanes)
        return
    with tir.serial(0, width // Q8_BLOCK) as block:
        tir.store(out.xq, (block, row, 0), tir.const(0, "int8", Q8_BLOCK), Q8_BLOCK)
        for halves in (out.xd, out.xs):
            tir.store(halves, (block, row, 0), _zero(2), 2)
        tir.store(out.xt, (block, row), _zero(1), 1)


def _merge_row(
    job: Attention,
    parts: tuple[Buffer, Buffer],
    items: tuple[Expr, Expr],
    out: Buffer,
    row: Expr | None,
) -> None:
    """Merge work items into `out`, which is zero: row `row` of it, or all of it."""
    acc, ml = parts
    with tir.serial(0, job.heads) as head:
        state = tir.scratch(2, "float32")  # the largest score and the sum of weights so far
        tir.store(state, 0, tir.const(NOTHING, "float32"), 1)
        tir.store(state, 1, _zero(1), 1)

        def place(c: Expr, head: Expr = head) -> Expr:
            column = head * job.head_dim + c
            return column if row is None else (row, column)

        with tir.serial(*items) as item:
            step = merge(job, state[0], ml[item, head, 0])
            tir.store(state, 1, step.joined(state[1], ml[item, head, 1]), 1)
            tir.store(state, 0, step.largest, 1)
            with tir.serial(0, job.head_dim // job.lanes) as i:
                c = i * job.lanes
                segment = tir.load(acc, (item, head, c), job.lanes)
                before = tir.load(out, place(c), job.lanes)
                value = join_values(before, segment, (step.keep, step.take), job.lanes)
                tir.store(out, place(c), value, job.lanes)
        inverse = tir.let(tir.const(1.0, "float32") / state[1])
        with tir.serial(0, job.head_dim // job.lanes) as i:
            c = i * job.lanes
            value = tir.load(out, place(c), job.lanes) * tir.splat(inverse, job.lanes)
            tir.store(out, place(c), value, job.lanes)
