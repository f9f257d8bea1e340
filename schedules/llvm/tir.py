"""The words CPU kernels are written in: a thin vocabulary over TVM's TIR builder.

A kernel is an ordinary Python function that runs once and leaves a PrimFunc behind: Python loops
unroll, `serial` and `parallel` make loops of the program. Nothing is parsed, so building one takes
milliseconds. Vector values are TIR expressions of dtype `<scalar>x<lanes>`; `let` names one so that
it is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

T = builder  # its statements and expressions, for what has no word here
Expr = Any  # a TIR expression
Buffer = Any  # a TIR buffer

serial, parallel, unroll = T.serial, T.parallel, T.unroll
if_then_else, floordiv = T.if_then_else, T.floordiv


def prim_func(name: str, body: Callable[[], None]) -> tirx.PrimFunc:
    """The PrimFunc that `body` makes: it declares its arguments with `arg` and emits statements.

    The result is final: it is marked as scheduled and its buffers as not aliasing each other.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": name})
        body()
    return builder.get()


def arg(name: str, shape: Iterable[Any], dtype: str) -> Buffer:
    """Declare the next argument of the kernel."""
    return T.arg(name, T.buffer(tuple(shape), dtype, layout=None))


def scratch(size: int, dtype: str) -> Buffer:
    """A thread's own buffer; below 1 KiB it lives in registers or on the stack.

    Declared inside the parallel loop. Larger ones are taken from the thread pool's workspace, so
    they are declared outside inner loops.
    """
    return T.alloc_buffer((size,), dtype, layout=None)


def rows_var(name: str = "n") -> Expr:
    """A symbolic number of rows."""
    return tirx.Var(name, "int64")


def long(value: int) -> Expr:
    """A constant of the dtype of shapes: a loop up to it can index the largest weights."""
    return tirx.const(value, "int64")


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """The statements inside `with` run only where `condition` holds."""
    with T.If(condition), T.Then():
        yield


def size_of(dtype: str) -> int:
    """Bytes of a scalar."""
    return np.dtype(dtype).itemsize


def let(value: Expr) -> Expr:
    """Compute `value` here, once."""
    return T.bind(value)


def load(buffer: Buffer, index: Expr, lanes: int) -> Expr:
    """`lanes` consecutive elements of a buffer from `index` (aligned as the element is).

    The index of a buffer of several dimensions is a tuple, the vector runs along the last.
    """
    return buffer[_span(index, lanes)]


def store(buffer: Buffer, index: Expr, value: Expr, lanes: int) -> None:
    """The counterpart of `load`."""
    T.buffer_store(buffer, value, _span(index, lanes))


def _span(index: Expr, lanes: int) -> tuple[Expr, ...]:
    *outer, last = index if isinstance(index, tuple) else (index,)
    return (*outer, last if lanes == 1 else tirx.Ramp(last, 1, lanes))


def splat(value: Expr, lanes: int) -> Expr:
    """`value` in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def const(value: float, dtype: str, lanes: int = 1) -> Expr:
    """A constant of a scalar dtype, in every lane."""
    return splat(tirx.const(value, dtype), lanes)


def cast(value: Expr, dtype: str, lanes: int = 1) -> Expr:
    """Convert each lane."""
    return T.Cast(dtype if lanes == 1 else f"{dtype}x{lanes}", value)


def bits(value: Expr, dtype: str, lanes: int = 1) -> Expr:
    """The same bytes read as another dtype."""
    return T.reinterpret(dtype if lanes == 1 else f"{dtype}x{lanes}", value)


def fma(a: Expr, b: Expr, c: Expr, lanes: int = 1) -> Expr:
    """a * b + c rounded once, always: the compiler may neither split nor contract it.

    Written out wherever a result is accumulated, so that kernels for 1 row and for many give equal
    bits.
    """
    if lanes == 1:
        return T.call_llvm_pure_intrin("float32", "llvm.fma.f32", a, b, c)
    return T.call_llvm_pure_intrin(f"float32x{lanes}", f"llvm.fma.v{lanes}f32", a, b, c)


def prefetch(buffer: Buffer, index: Expr) -> None:
    """Ask for the cache line of `buffer[index]`, which may lie past the end."""
    read, keep, data = T.int32(0), T.int32(3), T.int32(1)
    T.evaluate(
        T.call_llvm_intrin(
            "void", "llvm.prefetch.p0", T.address_of(buffer[index]), read, keep, data
        )
    )


def shuffle(vector: Expr, lanes: list[int]) -> Expr:
    """The named lanes of a vector, in that order; a scalar where there is one."""
    # The node wants no more results than lanes given.
    copies = 1 + (len(lanes) - 1) // (max(lanes) + 1)
    return T.Shuffle([vector] * copies, lanes)


def tree_sum(terms: Iterable[Expr]) -> Expr:
    """The sum of the terms, paired as a balanced tree."""
    level = list(terms)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def fold_float(value: Expr, lanes: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """All lanes of a f32 vector combined into one scalar, upper half with lower half each time."""
    while lanes > 1:
        value, lanes = let(value), lanes // 2
        if lanes == 1:
            value = combine(T.Shuffle([value], [0]), T.Shuffle([value], [1]))
        else:
            half = f"float32x{lanes}"
            value = combine(T.vectorlow(half, value), T.vectorhigh(half, value))
    return let(value)


def fold_int(value: Expr, lanes: int, operation: str) -> Expr:
    """All lanes of an int32 vector combined by LLVM's reduction `operation`: add, smax, smin.

    An intrinsic, since TVM's simplifier takes exponential time over chains of integer vectors.
    """
    name = f"llvm.vector.reduce.{operation}.v{lanes}i32"
    return let(T.call_llvm_pure_intrin("int32", name, value))


def add(a: Expr, b: Expr) -> Expr:
    """a + b."""
    return a + b


def each_row(rows: int | Expr, work: int) -> Any:
    """The loop over the rows of a step, entered by `with`; `work` is the elements of one row.

    One row needs no loop, and few rows no threads: a launch costs as much as some thousand
    elements.
    """
    if not isinstance(rows, int):
        return parallel(0, rows)
    if rows == 1:
        return nullcontext(tirx.const(0, "int32"))
    return serial(0, rows) if rows * work < 8192 else parallel(0, rows)
