"""The likeliest token of each row on a GPU: of logits, or of the output head without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.linear import LinearKnobs, open_threads
from xpuc.schedules.cuda.products import ACTIVATIONS, Stream, Weight, row_sums
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T, Threads

_SEARCH_WARPS = 16
_INFINITY_BITS = 0x7F800000  # a magnitude above it is NaN


@dataclass(frozen=True)
class HeadKnobs(LinearKnobs):
    """How the output head uses the GPU; `passes`, times a warp takes some rows."""

    passes: int = 4


_HEAD = HeadKnobs(warps=8)


@dataclass(frozen=True)
class Best:
    """A thread's largest value so far and its index: the lowest of equals, -1 after a NaN."""

    value: Buffer  # f32
    index: Buffer  # int32

    @staticmethod
    def none() -> Best:
        """Nothing seen yet."""
        best = Best(tir.registers(1, "float32"), tir.registers(1, "int32"))
        tir.store(best.value, 0, tir.const(float("-inf"), "float32"))
        tir.store(best.index, 0, tir.const(0x7FFFFFFF, "int32"))
        return best

    def see(self, value: Expr, index: Expr) -> None:
        """A number of an index, or the outcome of another search."""
        value, index = tir.let(value), tir.let(index)
        is_nan = (tir.bits(value, "int32") & tir.const(0x7FFFFFFF, "int32")) > _INFINITY_BITS
        value = tir.let(T.Select(is_nan, tir.const(float("inf"), "float32"), value))
        index = tir.let(T.Select(is_nan, tir.const(-1, "int32"), index))
        equal = tirx.And(value == self.value[0], index < self.index[0])
        with tir.when(tirx.Or(value > self.value[0], equal)):
            tir.store(self.value, 0, value)
            tir.store(self.index, 0, index)

    def of_block(self, threads: Threads) -> None:
        """Thread 0 has the best of its block."""
        mask = WARP // 2
        while mask:
            others = [tir.let(tir.shuffle_xor(r[0], mask)) for r in (self.value, self.index)]
            self.see(others[0], others[1])
            mask //= 2
        values, indices = (tir.shared(threads.warps, t) for t in ("float32", "int32"))
        with tir.when(threads.lane == 0):
            tir.store(values, threads.warp, self.value[0])
            tir.store(indices, threads.warp, self.index[0])
        tir.sync_block()
        with tir.when(threads.thread == 0), tir.serial(1, threads.warps) as warp:
            self.see(values[warp], indices[warp])


def argmax(v: int, m: int | None) -> tirx.PrimFunc:
    """logits f32 (m, v) -> i32 (m,): the lowest index of the largest, -1 where a logit is NaN."""
    rows = tir.rows_var() if m is None else m

    def body() -> None:
        logits = tir.arg("logits", (rows, v), "float32")
        out = tir.arg("out", (rows,), "int32")
        threads = tir.launch((rows,), _SEARCH_WARPS)
        row = threads.block[0]
        _search(threads, v, lambda i: (tir.load(logits, (row, i)), i), out)

    return tir.prim_func(f"argmax_{v}_r{m or 'n'}", body)


def _search(
    threads: Threads, count: int, at: Callable[[Expr], tuple[Expr, Expr]], out: Buffer
) -> None:
    """out[row] = the index of the best of `count` (value, index), for a block of threads."""
    best = Best.none()
    width = threads.warps * WARP
    with tir.serial(0, -(-count // width)) as turn:
        i = tir.let(turn * width + threads.thread)
        with tir.when(i < count):
            best.see(*at(i))
    best.of_block(threads)
    with tir.when(threads.thread == 0):
        tir.store(out, threads.block[0], best.index[0])


def head_blocks(rows: int, knobs: HeadKnobs = _HEAD) -> int:
    """Blocks of threads that share the rows of the output head."""
    return -(-rows // (knobs.block_rows * knobs.passes))


def head_best(
    weight: Weight, k: int, n: int | None, *, activation: str, knobs: HeadKnobs = _HEAD
) -> tirx.PrimFunc:
    """The best of x W^T among the rows of each block.

    Arguments: the activation of n rows; the planes; outputs f32 and int32 (n, head_blocks). The
    products have the bits of `linear`.
    """
    blocks = head_blocks(weight.rows, knobs)

    def body() -> None:
        all_rows = tir.rows_var() if n is None else n
        x = ACTIVATIONS[activation].declare(all_rows, k)
        matrix = weight.declare("w", k)
        found = [tir.arg(name, (all_rows, blocks), t)
                 for name, t in (("values", "float32"), ("indices", "int32"))]  # fmt: skip
        threads, rows = open_threads(blocks, all_rows, knobs.warps)
        bests = [Best.none() for _ in range(rows.count)]
        with tir.serial(0, knobs.passes) as turn:
            start = tir.let(
                (threads.block[0] * knobs.passes + turn) * knobs.block_rows
                + threads.warp * knobs.rows
            )
            streams = [Stream(matrix, tir.let(start + i)) for i in range(knobs.rows)]
            products = row_sums(streams, x, rows, threads.lane, knobs.ahead)
            for stream, sums in zip(streams, products, strict=True):
                with tir.when(stream.row < weight.rows):
                    for best, value in zip(bests, sums, strict=True):
                        best.see(value, stream.row)
        for c, best in enumerate(bests):
            best.of_block(threads)
            with tir.when(threads.thread == 0), rows.when_there(c) as row:
                tir.store(found[0], (row, threads.block[0]), best.value[0])
                tir.store(found[1], (row, threads.block[0]), best.index[0])

    words = ["head_best", weight.format.lower(), f"{weight.rows}x{k}"]
    words += ["f32"] if activation == "f32" else []
    return tir.prim_func("_".join([*words, f"r{n or 'n'}"]), body)


def best_of_blocks(blocks: int, n: int | None) -> tirx.PrimFunc:
    """values f32, indices int32 (n, blocks) of `head_best` -> ids int32 (n,)."""
    rows = tir.rows_var() if n is None else n

    def body() -> None:
        values = tir.arg("values", (rows, blocks), "float32")
        indices = tir.arg("indices", (rows, blocks), "int32")
        ids = tir.arg("ids", (rows,), "int32")
        threads = tir.launch((rows,), _SEARCH_WARPS)
        row = threads.block[0]
        _search(threads, blocks, lambda i: (values[row, i], indices[row, i]), ids)

    return tir.prim_func(f"best_of_{blocks}_r{n or 'n'}", body)
