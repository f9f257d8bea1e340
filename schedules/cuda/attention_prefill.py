"""Attention of many rows on a GPU: flash attention on tensor cores, a tile of rows a block.

The queries of a tile before one head of the pool, rows times the heads that share it, are the rows
of a matrix; 16 of them are a warp's. The context passes in chunks through shared memory: scores are
`mma` products in f32 of f16 queries and keys, softmax runs online, and weights, as f16, multiply
the values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import add

from tvm import tirx

from xpuc.schedules.attention_job import GROUP
from xpuc.schedules.cuda import pools, tir
from xpuc.schedules.cuda.attention import Attention, Context
from xpuc.schedules.cuda.attention_merge import NOTHING
from xpuc.schedules.cuda.pools import VECTOR, Place
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T, Threads

_ROWS = 16  # queries of a warp
_QUERIES = 64  # of a tile
_PAD = 8  # elements after a row in shared memory, so that 8 rows start in different banks


def tile_rows_for(heads: int, kv_heads: int) -> int:
    """Rows of one sequence that a tile takes at most."""
    return max(1, _QUERIES * kv_heads // heads)


def accepts(job: Attention) -> bool:
    """Whether the kernel is for such a layer: whole steps of 16 dimensions, registers for them."""
    return job.head_dim % 16 == 0 and job.group <= _QUERIES and job.head_dim <= 256


@dataclass(frozen=True)
class PrefillKnobs:
    """How a tile is taken. No result depends on it; the chunks of a context decide its bits.

    `warps` of a block, for 16 of the 64 queries of a tile each: fewer make more blocks; `ahead` are
    the loads of 16 bytes that a thread asks for before it lays the first down in shared memory.
    """

    warps: int = 4
    ahead: int = 1

    def __post_init__(self) -> None:
        assert _QUERIES % (_ROWS * self.warps) == 0, f"{_QUERIES} queries by {self.warps} warps"

    @property
    def splits(self) -> int:
        """Blocks that share a tile."""
        return _QUERIES // (_ROWS * self.warps)


_DEFAULTS = PrefillKnobs()


def attention_prefill(
    job: Attention, n: int | None, *, knobs: PrefillKnobs = _DEFAULTS
) -> tirx.PrimFunc:
    """Causal attention of tiles of rows.

    Arguments: q f32 (n, heads head_dim); positions i32 (n,); tiles i32 (t, 4) = (first row, rows,
    first work item, work items) with at most `tile_rows_for` rows of consecutive positions; work
    i32 (w, 4), whose third column is the sequence; block_table i32 (s, max_blocks); the arrays
    of the pool; output o f32 (n, heads head_dim). Rows in no tile are left as they were.
    """
    assert accepts(job), job
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        width = job.heads * job.head_dim
        count = tir.rows_var("t")
        q = tir.arg("q", (rows, width), "float32")
        positions = tir.arg("positions", (rows,), "int32")
        tiles = tir.arg("tiles", (count, 4), "int32")
        work = tir.arg("work", (tir.rows_var("w"), 4), "int32")
        table = tir.arg("block_table", (tir.rows_var("s"), tir.rows_var("max_blocks")), "int32")
        pool = pools.declare(job)
        out = tir.arg("o", (rows, width), "float32")
        threads = tir.launch((job.kv_heads * knobs.splits, count), knobs.warps)
        share, tile = threads.block
        row, n_rows, item = (tir.let(tiles[tile, i]) for i in range(3))
        is_whole = knobs.splits == 1
        kv_head = share if is_whole else tir.let(share // knobs.splits)
        query = 0 if is_whole else tir.let(share % knobs.splits * (_ROWS * knobs.warps))
        context = Context(pool, table, tir.let(work[item, 2]), kv_head)
        with nullcontext() if is_whole else tir.when(query < n_rows * job.group):
            rows_of = _Rows(row, n_rows, tir.let(positions[row]), query)
            flash = _Flash(job, knobs, threads, context, rows_of)
            flash.read_queries(q)
            flash.pass_context()
            flash.write(out)

    return tir.prim_func(f"attention_prefill_{job.name}_r{n or 'n'}", body)


@dataclass(frozen=True)
class _Rows:
    """Those of a tile: the first, their number, the first one's position; `query` is the block's
    first, of theirs before a head of the pool."""

    row: Expr
    count: Expr
    position: Expr
    query: Expr


@dataclass(frozen=True)
class _Copy:
    """8 elements from the pool to shared memory as f16, zeros where they are not there.

    What is not there may be loaded all the same: it is that of another place.
    """

    into: Buffer
    at: tuple[Expr, Expr]
    there: Expr
    load: Callable[[Buffer], None]


class _Flash:
    """A block of threads before one head; a thread holds parts of two queries of its warp.

    Fragments are those of mma m16n8k16: lane l has rows l / 4 and l / 4 + 8, of a tile of 8 columns
    columns 2 (l % 4) and the next. `q` has a register (two f16) for each 8 dimensions of each row,
    `sums` 4 f32 for each 8 dimensions, `top` and `total` one a row.
    """

    def __init__(
        self, job: Attention, knobs: PrefillKnobs, threads: Threads, context: Context, rows: _Rows
    ) -> None:
        self.job, self.knobs, self.threads, self.context = job, knobs, threads, context
        self.row, first = rows.row, rows.position
        self.chunk = 64 if job.head_dim <= 128 else 32  # tokens
        lane = threads.lane
        self.queries = rows.count * job.group
        self.mine = [tir.let(rows.query + threads.warp * 16 + lane // 4 + 8 * i) for i in range(2)]
        self.columns = tir.let(lane % 4 * 2)
        self.positions = [tir.let(first + m // job.group) for m in self.mine]
        self.last = tir.let(first + rows.count - 1)
        self.low = tir.let(tir.maximum(0, first - job.window + 1)) if job.window else 0
        self.q = tir.registers(job.head_dim // 4, "uint32")
        self.sums = tir.registers(job.head_dim // 2, "float32")
        self.top, self.total = tir.registers(2, "float32"), tir.registers(2, "float32")
        self.keys = tir.shared((job.head_dim, self.chunk + _PAD), "float16")
        self.values = tir.shared((self.chunk, job.head_dim + _PAD), "float16")

    def read_queries(self, q: Buffer) -> None:
        """As f16; those past the tile's last are read as its first."""
        job = self.job
        for i, m in enumerate(self.mine):
            inside = tir.let(T.Select(m < self.queries, m, tir.const(0, "int32")))
            row = tir.let(self.row + inside // job.group)
            head = self.context.kv_head * job.group + inside % job.group
            start = tir.let(head * job.head_dim)
            for tile in range(job.head_dim // 8):
                c = start + 8 * tile + self.columns
                tir.store(self.q, 2 * tile + i, _pair(q[row, c], q[row, c + 1]))
            tir.store(self.top, i, tir.const(NOTHING, "float32"))
            tir.store(self.total, i, tir.const(0.0, "float32"))
        for i in range(job.head_dim // 2):
            tir.store(self.sums, i, tir.const(0.0, "float32"))

    def pass_context(self) -> None:
        """The chunks that any row of the tile sees, in ascending order."""
        begin, end = self.low // self.chunk, self.last // self.chunk + 1
        with tir.serial(0, end - begin) as turn:
            start = tir.let((begin + turn) * self.chunk)
            tir.sync_block()
            self._fetch(start)
            tir.sync_block()
            scores = self._scores()
            self._weigh(scores, start)
            self._add_values(scores)

    def _fetch(self, start: Expr) -> None:
        """A chunk into shared memory; what no row of the tile sees becomes zeros."""
        hd = self.job.head_dim
        groups = self.chunk // GROUP

        def key(i: Expr) -> _Copy:
            d, side = tir.let(i // (2 * groups)), tir.let(i % (2 * groups))
            place, is_there = self._place(start + side // 2 * GROUP)
            place = place._replace(offset=place.offset + side % 2 * VECTOR)
            return _Copy(
                self.keys, (d, side * VECTOR), is_there,
                lambda part: self.context.pool.load_keys(part, place, d),
            )  # fmt: skip

        def value(i: Expr) -> _Copy:
            t, c = tir.let(i // (hd // VECTOR)), tir.let(i % (hd // VECTOR) * VECTOR)
            token = tir.let(start + t)
            place, is_there = self._place(token // GROUP * GROUP)
            place = place._replace(offset=place.offset + token % GROUP)
            return _Copy(
                self.values, (t, c), tirx.And(is_there, token <= self.last),
                lambda part: self.context.pool.load_values(part, place, c),
            )  # fmt: skip

        self._share(hd * 2 * groups, key)
        self._share(self.chunk * hd // 8, value)

    def _share(self, count: int, find: Callable[[Expr], _Copy]) -> None:
        """`count` copies, which `find` finds by their numbers, shared by the threads."""
        width = self.threads.warps * WARP
        ahead = min(self.knobs.ahead, -(-count // width))
        with tir.serial(0, -(-count // (width * ahead))) as turn:
            numbers = [tir.let((turn * ahead + i) * width + self.threads.thread)
                       for i in range(ahead)]  # fmt: skip
            if ahead == 1:
                with tir.when(numbers[0] < count):
                    copy = find(numbers[0])
                    _store(copy, _loaded(copy))
                return
            waiting = []
            for i in numbers:  # with no branch between two loads
                copy, part = find(tir.let(tir.minimum(i, count - 1))), _part()
                copy.load(part)
                waiting.append((i, copy, part))
            for i, copy, part in waiting:
                with tir.when(tirx.Not(copy.there)):
                    _clear(part)
                with tir.when(i < count):
                    _store(copy, part)

    def _place(self, token: Expr) -> tuple[Place, Expr]:
        """Where a group of tokens lies, from its first, and whether any row sees one of them.

        A place that has left the window may name no block any more.
        """
        tokens, context = self.job.block_tokens, self.context
        there = tirx.And(token <= self.last, token + GROUP > self.low)
        entry = context.block_table[context.seq, token // tokens]
        block = tir.let(tir.if_then_else(there, entry, tir.const(0, "int32")))
        return Place(block, context.kv_head, token % tokens // GROUP * GROUP), there

    def _scores(self) -> Buffer:
        """Dot products of the warp's queries with the chunk: 4 f32 for each 8 tokens."""
        hd, tiles = self.job.head_dim, self.chunk // 8
        scores = tir.registers(4 * tiles, "float32")
        for i in range(4 * tiles):
            tir.store(scores, i, tir.const(0.0, "float32"))
        for step in range(hd // 16):
            a = [self.q[4 * step + i] for i in range(4)]
            for pair in range(tiles // 2):
                b = self._fragments(self.keys, 16 * step, 16 * pair)
                for side in range(2):
                    at = 4 * (2 * pair + side)
                    tir.mma_f16(scores, at, a, [b[2 * side], b[2 * side + 1]])
        return scores

    def _fragments(self, tile: Buffer, row: int, column: int) -> Buffer:
        """16 rows by 16 columns of shared memory as the second operands of two products."""
        lane = self.threads.lane
        into = tir.registers(4, "uint32")
        index = [row + lane % 16, column + lane // 16 * 8]
        tir.load_matrices(into, 0, 4, tile, index, transposed=True)
        return into

    def _weigh(self, scores: Buffer, start: Expr) -> None:
        """Scores into weights; what came before is scaled to the new largest."""
        job, tiles = self.job, self.chunk // 8
        for i in range(2):
            own = [4 * tile + 2 * i + c for tile in range(tiles) for c in range(2)]
            top: Expr = tir.const(NOTHING, "float32")
            for at in own:
                token = start + at // 4 * 8 + self.columns + at % 2
                seen = token <= self.positions[i]
                if job.window:
                    seen = tirx.And(seen, token > self.positions[i] - job.window)
                score = T.Select(seen, job.score(scores[at]), tir.const(NOTHING, "float32"))
                tir.store(scores, at, score)
                top = tir.let(tir.maximum(top, scores[at]))
            top = _of_row(top, tir.maximum)
            largest = tir.let(tir.maximum(self.top[i], top))
            keep = tir.let(tir.fast_exp2(self.top[i] - largest))
            total: Expr = tir.const(0.0, "float32")
            for at in own:
                hidden = scores[at] <= tir.const(NOTHING, "float32")
                weight = tir.fast_exp2(scores[at] - largest)
                tir.store(scores, at, T.Select(hidden, tir.const(0.0, "float32"), weight))
                total = tir.let(total + scores[at])
            tir.store(self.top, i, largest)
            tir.store(self.total, i, tir.fma(self.total[i], keep, total))
            for tile in range(job.head_dim // 8):
                for c in range(2):
                    at = 4 * tile + 2 * i + c
                    tir.store(self.sums, at, self.sums[at] * keep)

    def _add_values(self, weights: Buffer) -> None:
        """The chunk's values, weighted, to the sums."""
        for step in range(self.chunk // 16):
            at = 8 * step
            a = [tir.let(_pair(weights[at + i], weights[at + i + 1])) for i in (0, 2, 4, 6)]
            for pair in range(self.job.head_dim // 16):
                b = self._fragments(self.values, 16 * step, 16 * pair)
                for side in range(2):
                    to = 4 * (2 * pair + side)
                    tir.mma_f16(self.sums, to, a, [b[2 * side], b[2 * side + 1]])

    def write(self, out: Buffer) -> None:
        """The warp's rows of the result."""
        job = self.job
        for i, m in enumerate(self.mine):
            total = _of_row(self.total[i], add)
            inverse = tir.let(tir.const(1.0, "float32") / total)
            with tir.when(m < self.queries):
                row = tir.let(self.row + m // job.group)
                head = self.context.kv_head * job.group + m % job.group
                start = tir.let(head * job.head_dim + self.columns)
                for tile in range(job.head_dim // 8):
                    for c in range(2):
                        value = self.sums[4 * tile + 2 * i + c] * inverse
                        tir.store(out, (row, start + 8 * tile + c), value)


def _loaded(copy: _Copy) -> Buffer:
    """Its elements."""
    part = _part()
    _clear(part)
    with tir.when(copy.there):
        copy.load(part)
    return part


def _part() -> Buffer:
    return tir.registers(VECTOR, "float16")


def _clear(part: Buffer) -> None:
    for i in range(VECTOR):
        tir.store(part, i, tir.const(0.0, "float16"))


def _store(copy: _Copy, part: Buffer) -> None:
    tir.store(copy.into, copy.at, tir.load(part, 0, VECTOR), VECTOR)


def _of_row(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Of the four lanes that share a row."""
    for mask in (1, 2):
        value = tir.let(combine(value, tir.shuffle_xor(value, mask)))
    return value


def _pair(first: Expr, second: Expr) -> Expr:
    """Two f32 as two f16 in a word."""
    low, high = (
        tir.cast(tir.bits(tir.cast(x, "float16"), "uint16"), "uint32") for x in (first, second)
    )
    return low | T.shift_left(high, tir.const(16, "uint32"))
