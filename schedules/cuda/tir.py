"""The words GPU kernels are written in: a thin vocabulary over TVM's TIR builder.

A kernel is an ordinary Python function that runs once and leaves a PrimFunc behind, as on the CPU
(`schedules/llvm/tir.py`): Python loops unroll, `serial` makes a loop of the program, nothing is
parsed. Its dialect is TVM's tirx: `launch` opens the threads, and what follows is what one of them
does. Vector values are TIR expressions of dtype `<scalar>x<lanes>`, up to 16 bytes.

Kernels are compiled without contraction (`codegen/cuda`): a product and a sum are one instruction
where `fma` says so and nowhere else, so kernels for 1 row and for many give equal bits, and an
emulated GPU gives those of a real one. `/`, `T.exp` and `T.sqrt` are the accurate ones; the
instructions that approximate have words of their own (`fast_exp2`, `fast_divide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

T = builder  # its statements and expressions, for what has no word here
Expr = Any  # a TIR expression
Buffer = Any  # a TIR buffer

WARP = 32  # lanes of a warp
ALIGNMENT = 16  # bytes: of every argument, and of the longest load

serial, unroll = T.serial, T.unroll
if_then_else, floordiv, minimum, maximum = T.if_then_else, T.floordiv, T.min, T.max


def prim_func(name: str, body: Callable[[], None]) -> tirx.PrimFunc:
    """The PrimFunc that `body` makes: arguments first, then `launch`, then what a thread does.

    The result is final: it is marked as scheduled and its buffers as not aliasing each other. Its
    device function is called `<name>_kernel`.
    """
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": name})
        body()
    return builder.get()


def arg(name: str, shape: Iterable[Any], dtype: str) -> Buffer:
    """Declare the next argument of the kernel: a tensor in global memory."""
    return T.arg(name, T.buffer(tuple(shape), dtype, align=ALIGNMENT))


def view(buffer: Buffer, shape: Iterable[Any], dtype: str) -> Buffer:
    """The same memory as a tensor of another shape and dtype."""
    return T.decl_buffer(tuple(shape), dtype, data=buffer.data, align=ALIGNMENT)


def rows_var(name: str = "n") -> Expr:
    """A symbolic number of rows: a dimension of arguments, an extent of the grid.

    Of 32 bits, so that indices are: a tensor with such a dimension has fewer than 2^31 elements.
    """
    return tirx.Var(name, "int32")


@dataclass(frozen=True)
class Threads:
    """Where a thread is: its block on each axis of the grid, its warp in the block, its lane."""

    block: tuple[Expr, ...]
    warp: Expr
    lane: Expr
    thread: Expr  # in the block: warp * 32 + lane
    warps: int  # of a block


def launch(grid: Sequence[int | Expr], warps: int) -> Threads:
    """Open the threads: blocks of `warps` warps on a grid of up to three axes, the first fastest.

    Called once, after the arguments. Extents are numbers, or made of `rows_var`s.
    """
    T.device_entry()
    block = T.cta_id(list(grid))
    warp, lane = T.warp_id([warps]), T.lane_id([WARP])
    thread = T.thread_id([warps * WARP])
    return Threads((block,) if len(grid) == 1 else tuple(block), warp, lane, thread, warps)


def reside(blocks: int) -> None:
    """Have the compiler keep to registers that let so many blocks be on a multiprocessor."""
    _attribute("tirx.launch_bounds_min_blocks_per_sm", blocks)


def registers(shape: int | tuple[int, ...], dtype: str) -> Buffer:
    """A thread's own variables. Indices must be known when compiled, else they go to memory."""
    return T.alloc_local(shape if isinstance(shape, tuple) else (shape,), dtype)


def shared(shape: int | tuple[int, ...], dtype: str) -> Buffer:
    """Memory of the block, aligned for vectors, undefined at first; 48 KiB at most in all."""
    shape = shape if isinstance(shape, tuple) else (shape,)
    return T.alloc_buffer(shape, dtype, scope="shared", align=ALIGNMENT)


def large_shared(*parts: tuple[tuple[int, ...], str]) -> list[Buffer]:
    """Buffers of these shapes and dtypes, beyond 48 KiB too: memory that the launch asks for.

    Called once in a kernel. Each starts at a multiple of 1024 bytes, where a swizzled tile may.
    """
    pool = T.SMEMPool(T.alloc_buffer((0,), "uint8", scope="shared.dyn", align=1024).data)
    buffers = [pool.alloc(shape, dtype, align=1024) for shape, dtype in parts]
    _attribute("tirx.dyn_smem_bytes", pool.offset)
    return buffers


def _attribute(name: str, value: int) -> None:
    """Say something of the kernel to TVM's lowering."""
    T.add_to_parent(tirx.AttrStmt(0, name, tirx.IntImm("int64", value), tirx.Evaluate(0)))


def sync_block() -> None:
    """A barrier that every thread of the block reaches; orders shared and global memory for it."""
    T.evaluate(T.cuda.cta_sync())


def sync_warp() -> None:
    """The same for the lanes of a warp."""
    T.evaluate(T.cuda.warp_sync())


def arrive(counter: Buffer, index: Expr) -> Expr:
    """Add 1 to an int32 in global memory; what it was before.

    What this thread wrote, and the block before a `sync_block`, is seen by whoever arrives later,
    and after a `sync_block` by the block of that.
    """
    at = index if isinstance(index, tuple) else (index,)
    return T.cuda.func_call(
        "xpuc_arrive", counter.ptr_to(list(at)), source_code=_ARRIVE, return_type="int32"
    )


# One fence before and none after, weaker than those of `__threadfence` around an `atomicAdd`.
_ARRIVE = """
__device__ __forceinline__ int xpuc_arrive(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before) : "l"(__cvta_generic_to_global(counter)) : "memory");
  return before;
}
"""


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """The statements inside `with` run only where `condition` holds.

    A barrier may be inside only if it holds for all threads of the block, or for none.
    """
    with T.If(condition), T.Then():
        yield


def let(value: Expr) -> Expr:
    """Compute `value` here, once."""
    return T.bind(value)


def load(buffer: Buffer, index: Expr, lanes: int = 1) -> Expr:
    """`lanes` consecutive elements from `index`, aligned to their size: one load of up to 16 bytes.

    The index of a buffer of several dimensions is a tuple, the vector runs along the last.
    """
    return buffer[_span(index, lanes)]


def store(buffer: Buffer, index: Expr, value: Expr, lanes: int = 1) -> None:
    """The counterpart of `load`."""
    T.buffer_store(buffer, value, list(_span(index, lanes)))


def _span(index: Expr, lanes: int) -> tuple[Expr, ...]:
    *outer, last = index if isinstance(index, tuple) else (index,)
    return (*outer, last if lanes == 1 else tirx.Ramp(last, 1, lanes))


def element(vector: Expr, lane: int) -> Expr:
    """One lane of a vector."""
    return T.Shuffle([vector], [lane])


def vector(elements: Sequence[Expr]) -> Expr:
    """The vector of some scalars of one dtype."""
    gathered = registers(len(elements), str(elements[0].ty.dtype))
    for lane, value in enumerate(elements):
        store(gathered, lane, value)
    return load(gathered, 0, len(elements))


def const(value: float, dtype: str) -> Expr:
    """A constant."""
    return tirx.const(value, dtype)


def cast(value: Expr, dtype: str) -> Expr:
    """Convert a scalar; to a float of fewer bits with rounding to nearest even."""
    return T.Cast(dtype, value)


def bits(value: Expr, dtype: str) -> Expr:
    """The same bytes read as another dtype."""
    return T.reinterpret(dtype, value)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c in f32, rounded once."""
    return T.call_pure_extern("float32", "__fmaf_rn", a, b, c)


def fast_exp2(x: Expr) -> Expr:
    """2^x in f32 within 2 ulp, in one instruction; results below 2^-126 are 0."""
    return T.cuda.func_call("xpuc_exp2", x, source_code=_EXP2, return_type="float32")


_EXP2 = """
__device__ __forceinline__ float xpuc_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""


def fast_divide(a: Expr, b: Expr) -> Expr:
    """a / b in f32 within 2 ulp for |b| up to 2^126."""
    return T.call_pure_extern("float32", "__fdividef", a, b)


def round_even(x: Expr) -> Expr:
    """The whole number nearest to an f32, as int32; ties go to the even one."""
    return T.call_pure_extern("int32", "__float2int_rn", x)


def round_away(x: Expr) -> Expr:
    """The same; ties go away from zero."""
    return cast(T.call_pure_extern("float32", "roundf", x), "int32")


def dp4a(a: Expr, b: Expr, c: Expr) -> Expr:
    """c + the dot product of the four int8 in `a` and in `b` (int32 or uint32 words); int32."""
    return T.call_pure_extern("int32", "__dp4a", _signed(a), _signed(b), c)


def _signed(word: Expr) -> Expr:
    return bits(word, "int32") if str(word.ty.dtype) == "uint32" else word


def permute_bytes(low: Expr, high: Expr, selector: Expr) -> Expr:
    """Four of the eight bytes of two uint32 words, `low` first: byte i is the one that nibble i of
    `selector` says, 0 to 7; its upper half counts for nothing."""
    return T.cuda.func_call(
        "xpuc_prmt", low, high, selector, source_code=_PERMUTE, return_type="uint32"
    )


# `__byte_perm` masks the selector once more.
_PERMUTE = """
__device__ __forceinline__ unsigned xpuc_prmt(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}
"""


def shuffle_xor(value: Expr, mask: int) -> Expr:
    """The value of the lane whose number differs by `mask`. All lanes of the warp take part."""
    return T.tvm_warp_shuffle_xor(_ALL_LANES, value, mask, WARP, WARP)


def shuffle(value: Expr, lane: Expr) -> Expr:
    """The value of another lane. All lanes of the warp take part."""
    return T.tvm_warp_shuffle(_ALL_LANES, value, lane, WARP, WARP)


_ALL_LANES = tirx.const(0xFFFFFFFF, "uint32")


def reduce_warp(value: Expr, operation: str) -> Expr:
    """`add` or `max` of uint32 over the warp, in one instruction; every lane has it."""
    return let(T.call_extern("uint32", f"__reduce_{operation}_sync", _ALL_LANES, value))


def scan_warp(value: Expr, lane: Expr) -> Expr:
    """The sum over the lanes up to this one."""
    total = registers(1, str(value.ty.dtype))
    store(total, 0, value)
    for offset in (1, 2, 4, 8, 16):
        other = let(shuffle(total[0], maximum(lane - offset, 0)))
        with when(lane >= offset):
            store(total, 0, total[0] + other)
    return let(total[0])


def warp_reduce(value: Expr, operation: str, lanes: int = WARP) -> Expr:
    """`sum`, `max` or `min` over groups of `lanes` lanes; every lane has the same bits of it."""
    return let(T.cuda.warp_reduce(value, operation, lanes))


def block_reduce(threads: Threads, value: Expr, operation: str) -> Expr:
    """`sum`, `max` or `min` over the block, the warps in order; not inside a loop or `when`."""
    by_warp = shared(threads.warps, str(value.ty.dtype))
    of_warp = warp_reduce(value, operation)
    with when(threads.lane == 0):
        store(by_warp, threads.warp, of_warp)
    sync_block()
    total = load(by_warp, 0)
    for warp in range(1, threads.warps):
        total = _COMBINE[operation](total, load(by_warp, warp))
    return let(total)


_COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "sum": lambda a, b: a + b,
    "max": maximum,
    "min": minimum,
}


def load_matrices(
    into: Buffer,
    at: int,
    count: int,
    tile: Buffer,
    index: Sequence[Expr],
    *,
    transposed: bool = False,
) -> None:
    """`count` (1, 2, 4) 8x8 matrices of 16-bit elements from shared memory, a register of each.

    Lanes 8i to 8i+7 give with `index` the rows of matrix i, 16 bytes each; lane l gets elements
    2(l % 4) and the next of row l / 4, of the transposed matrix if `transposed`. The registers are
    `into[at]` and the following, uint32.
    """
    order = ".trans" if transposed else ""
    instruction = f"ldmatrix.sync.aligned.m8n8.x{count}{order}.shared.b16"
    pointer = tile.ptr_to(list(index))
    T.evaluate(T.ptx[instruction](*(into[at + i] for i in range(count)), pointer))


def mma_f16(
    acc: Buffer, at: int, a: Sequence[Expr], b: Sequence[Expr], *, onto: bool = True
) -> None:
    """Add the product of two tiles of f16, 16x16 and 16x8, to one of f32 (PTX mma m16n8k16).

    Four registers of a, two of b (uint32, two elements each), `acc[at]` to `acc[at + 3]`, which
    are overwritten if not `onto`.
    """
    _mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", acc, at, a, b, onto)


def mma_s8(
    acc: Buffer, at: int, a: Sequence[Expr], b: Sequence[Expr], *, onto: bool = True
) -> None:
    """Add the product of two tiles of int8, 16x32 and 32x8, to one of int32 (PTX mma m16n8k32).

    Four registers of a, two of b (four elements each); the sums are int32 in uint32 registers,
    which are overwritten if not `onto`.
    """
    _mma("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", acc, at, a, b, onto)


def _mma(
    instruction: str, acc: Buffer, at: int, a: Sequence[Expr], b: Sequence[Expr], onto: bool
) -> None:
    sums = [acc[at + i] for i in range(4)]
    before = sums if onto else [const(0, str(acc.dtype))] * 4
    T.evaluate(T.ptx[instruction](*sums, *a, *b, *before))


def copy_async(into: Buffer, at: Sequence[Expr], source: Buffer, index: Sequence[Expr]) -> None:
    """Start copying 16 bytes from global to shared memory, both aligned to 16."""
    copy = T.ptx["cp.async.cg.shared.global"]
    T.evaluate(copy(into.ptr_to(list(at)), source.ptr_to(list(index)), 16))


def commit_copies() -> None:
    """Close a group of the copies this thread started."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait_copies(groups_left: int) -> None:
    """Wait until at most that many groups of this thread's are on their way.

    What other threads copied is there after a `sync_block`.
    """
    T.evaluate(T.ptx["cp.async.wait_group"](groups_left))
