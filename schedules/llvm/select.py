"""What follows the output head: the rows that are wanted, the cap of their logits, their argmax."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from xpuc.schedules.llvm import tir, vmath
from xpuc.schedules.llvm.tir import Buffer, Expr, T

_CHUNKS = 16  # parts of a single row of logits, which the threads share
_INFINITY_BITS = 0x7F800000  # a magnitude above it is NaN


def argmax(v: int, m: int | None, *, lanes: int = 8) -> tirx.PrimFunc:
    """logits f32 (m, v) -> i32 (m,): the lowest index of the largest, -1 where a logit is NaN."""
    rows = _rows(m)

    def body() -> None:
        logits = tir.arg("logits", (rows, v), "float32")
        out = tir.arg("out", (rows,), "int32")
        if m == 1 and v >= _CHUNKS * 1024:
            _argmax_of_one(logits, out, v, lanes)
            return
        with tir.each_row(rows, v) as row:
            tir.store(out, row, _search(logits, row, (tirx.const(0, "int32"), v), lanes)[1], 1)

    return tir.prim_func(f"argmax_{v}_r{m or 'n'}", body)


def _argmax_of_one(logits: Buffer, out: Buffer, v: int, lanes: int) -> None:
    """One row, in chunks."""
    size = -(-v // (_CHUNKS * lanes)) * lanes
    values, indices = tir.scratch(_CHUNKS, "float32"), tir.scratch(_CHUNKS, "int32")
    with tir.parallel(0, _CHUNKS) as chunk:
        ends = [tir.let(T.min((chunk + i) * size, v)) for i in (0, 1)]
        value, index = _search(logits, 0, (ends[0], ends[1]), lanes)
        tir.store(values, chunk, value, 1)
        tir.store(indices, chunk, index, 1)
    with tir.serial(1, _CHUNKS) as chunk:
        value, index = tir.let(values[chunk]), tir.let(indices[chunk])
        # An index of -1 stays, and replaces any other; the first of equal values is the lowest.
        later = tirx.Or(index < 0, tirx.And(indices[0] >= 0, value > values[0]))
        with tir.when(later):
            tir.store(values, 0, value, 1)
            tir.store(indices, 0, index, 1)
    tir.store(out, 0, indices[0], 1)


def _search(logits: Buffer, row: Expr, columns: tuple[Expr, Expr], lanes: int) -> tuple[Expr, Expr]:
    """(value, index) of the largest logit among columns [begin, end); index -1 if one is NaN."""
    begin, end = columns
    best, indices, magnitudes = (tir.scratch(lanes, t) for t in ("float32", "int32", "int32"))
    tir.store(best, 0, tir.const(float("-inf"), "float32", lanes), lanes)
    tir.store(indices, 0, tirx.Ramp(begin, 1, lanes), lanes)
    tir.store(magnitudes, 0, tir.const(0, "int32", lanes), lanes)
    whole = tir.let((end - begin) // lanes)

    def look(column: Expr, lane: Expr, width: int) -> None:
        x = tir.let(tir.load(logits, (row, column), width))
        better = x > tir.load(best, lane, width)
        found = column if width == 1 else tirx.Ramp(column, 1, width)
        held = tir.load(indices, lane, width)
        tir.store(indices, lane, T.Select(better, found, held), width)
        tir.store(best, lane, T.Select(better, x, tir.load(best, lane, width)), width)
        magnitude = tir.bits(x, "int32", width) & tir.const(0x7FFFFFFF, "int32", width)
        largest = T.max(tir.load(magnitudes, lane, width), magnitude)
        tir.store(magnitudes, lane, largest, width)

    with tir.serial(0, whole) as i:
        look(begin + i * lanes, 0, lanes)
    with tir.serial(begin + whole * lanes, end) as column:
        look(column, 0, 1)
    with tir.serial(1, lanes) as lane:
        value, index = tir.let(best[lane]), tir.let(indices[lane])
        equal = tirx.And(value == best[0], index < indices[0])
        with tir.when(tirx.Or(value > best[0], equal)):
            tir.store(best, 0, value, 1)
            tir.store(indices, 0, index, 1)
    largest = tir.fold_int(tir.load(magnitudes, 0, lanes), lanes, "smax")
    bad = largest > tir.const(_INFINITY_BITS, "int32")
    return tir.let(best[0]), tir.let(T.Select(bad, tir.const(-1, "int32"), indices[0]))


def take_rows(d: int, n: int | None, m: int | None, *, lanes: int = 8) -> tirx.PrimFunc:
    """x f32 (n, d), rows i32 (m,) -> f32 (m, d), row i of which is row rows[i] of x."""
    source, wanted = _rows(n), _rows(m, "m")

    def body() -> None:
        x = tir.arg("x", (source, d), "float32")
        rows = tir.arg("rows", (wanted,), "int32")
        out = tir.arg("out", (wanted, d), "float32")
        width = lanes if d % lanes == 0 else 1
        with tir.each_row(wanted, d) as i:
            row = tir.let(rows[i])
            with tir.serial(0, d // width) as step:
                value = tir.load(x, (row, step * width), width)
                tir.store(out, (i, step * width), value, width)

    return tir.prim_func(f"take_rows_{d}_r{m or 'n'}", body)


def softcap(v: int, m: int | None, c: float, *, lanes: int = 8) -> tirx.PrimFunc:
    """x f32 (m, v) -> c * tanh(x / c), f32 (m, v)."""

    def capped(x: Expr, width: int) -> Expr:
        inner = x * tir.const(1.0 / c, "float32", width)
        return vmath.tanh(inner, width) * tir.const(c, "float32", width)

    return _each("softcap", v, m, capped, lanes)


def scale(d: int, m: int | None, factor: float, *, lanes: int = 8) -> tirx.PrimFunc:
    """x f32 (m, d) -> x * factor, f32 (m, d)."""
    return _each("scale", d, m, lambda x, w: x * tir.const(factor, "float32", w), lanes)


def _each(
    name: str, d: int, m: int | None, value: Callable[[Expr, int], Expr], lanes: int
) -> tirx.PrimFunc:
    rows, width = _rows(m), lanes if d % lanes == 0 else 1
    chunk = 1024 if d % 1024 == 0 else d  # what a thread takes: a row of logits alone is worth many

    def body() -> None:
        x = tir.arg("x", (rows, d), "float32")
        y = tir.arg("y", (rows, d), "float32")

        def part(row: Expr, first: Expr) -> None:
            with tir.serial(0, chunk // width) as step:
                c = first + step * width
                tir.store(y, (row, c), value(tir.load(x, (row, c), width), width), width)

        if m == 1 and d >= 8 * chunk:
            with tir.parallel(0, d // chunk) as i:
                part(0, i * chunk)
        else:
            with tir.each_row(rows, 8 * d) as row, tir.serial(0, d // chunk) as i:
                part(row, i * chunk)

    return tir.prim_func(f"{name}_{d}_r{m or 'n'}", body)


def _rows(n: int | None, name: str = "n") -> int | Expr:
    return tir.rows_var(name) if n is None else n
