"""Words for sm_90a alone: tiles copied by the tensor memory accelerator, products of a warpgroup.

A tile is rows of 128 bytes in shared memory, in the order the accelerator writes and the tensor
cores read (swizzled: `Buffer` indices do not find an element). A thread does not copy: one of the
block asks for tiles, all wait at a `CopyBarrier`.
"""

from __future__ import annotations

from dataclasses import dataclass

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import Buffer, Expr, T, Threads

WARPGROUP = 4  # warps
ROWS = 64  # of a product of one warpgroup
_ROW_BYTES, _STEP_BYTES = 128, 32  # of a tile; of it that one instruction multiplies
_SWIZZLE_128 = 3  # of CUtensorMapSwizzle, and of a matrix descriptor
_BYTES = {"float16": 2, "int8": 1}


@dataclass(frozen=True)
class TensorMap:
    """A matrix in global memory as the accelerator is told of it, by tiles of `rows` rows."""

    handle: Expr
    rows: int
    columns: int  # of a tile
    dtype: str

    @property
    def tile_bytes(self) -> int:
        return self.rows * _ROW_BYTES


def tensor_map(matrix: Buffer, tile_rows: int) -> TensorMap:
    """The map of a matrix (rows, columns) of float16 or int8, made on the host before `launch`.

    A row is a multiple of 16 bytes; at most 256 rows a tile.
    """
    dtype = str(matrix.dtype)
    rows, columns = matrix.shape
    width = _ROW_BYTES // _BYTES[dtype]
    handle = T.bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap"))
    stride, box, every, plain = columns * _BYTES[dtype], (width, tile_rows), (1, 1), 0
    encode = T.call_packed(
        "runtime.cuTensorMapEncodeTiled", handle, dtype, 2, matrix.data, columns, rows, stride,
        *box, *every, plain, _SWIZZLE_128, plain, plain,
    )  # fmt: skip
    T.evaluate(encode)
    return TensorMap(handle, tile_rows, width, dtype)


def tile(rows: int, dtype: str) -> Buffer:
    """Room for a tile in shared memory."""
    shape = (rows, _ROW_BYTES // _BYTES[dtype])
    return T.alloc_buffer(shape, dtype, scope="shared", align=1024)


class CopyBarrier:
    """Where the threads of a block wait for the tiles that one of them asked for."""

    def __init__(self, threads: Threads) -> None:
        """Make it ready; every thread of the block takes part."""
        self._word = tir.shared(1, "uint64")
        self._phase = tir.registers(1, "int32")
        tir.store(self._phase, 0, tir.const(0, "int32"))
        with tir.when(threads.thread == 0):
            one = tir.const(1, "uint32")
            T.evaluate(T.ptx["mbarrier.init.shared.b64"](self._address(), one))
        T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
        tir.sync_block()

    def copy(self, into: Buffer, source: TensorMap, row: Expr, column: Expr) -> None:
        """Ask for the tile from (row, column); zeros beyond the matrix. By one thread."""
        words = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        handle = T.address_of(source.handle)
        T.evaluate(T.ptx[words](into.data, handle, column, row, self._address()))

    def expect(self, *tiles: TensorMap) -> None:
        """Say what was asked for since the last wait, all of it; by the thread that asked."""
        total = tir.const(sum(t.tile_bytes for t in tiles), "uint32")
        words = "mbarrier.arrive.expect_tx.shared.b64"
        T.evaluate(T.ptx[words](self._address(), total))

    def wait(self) -> None:
        """Until it is there, for every thread of the block."""
        T.evaluate(T.cuda.mbarrier_wait(self._address(), self._phase[0]))
        tir.store(self._phase, 0, self._phase[0] ^ 1)

    def _address(self) -> Expr:
        return T.address_of(self._word[0])


def multiply_add(acc: Buffer, a: Buffer, a_row: Expr, b: Buffer) -> None:
    """acc += a[a_row : a_row + 64] b^T of two tiles, by a warpgroup; b has 8 to 256 rows.

    f16 into f32, int8 into int32 (in uint32 registers): rows(b) / 2 of them in `acc`, where
    `position` says what is what. The tiles may be overwritten after a `sync_block`.
    """
    dtype, n = str(a.dtype), int(b.shape[0])
    sums = [acc[i] for i in range(ROWS * n // (WARPGROUP * tir.WARP))]
    columns = _STEP_BYTES // _BYTES[dtype]
    product = T.ptx[f"wgmma.mma_async.sync.aligned.m64n{n}k{columns}.{_TYPES[dtype]}"]
    negate_and_transpose = (1, 1, 0, 0) if dtype == "float16" else ()
    descriptors = [tir.registers(1, "uint64") for _ in range(2)]
    _pin(sums, dtype)
    T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())
    for step in range(_ROW_BYTES // _STEP_BYTES):
        for descriptor, start in zip(descriptors, ((a, a_row), (b, 0)), strict=True):
            matrix, row = start
            T.evaluate(
                T.cuda.wgmma.encode_matrix_descriptor(
                    T.address_of(descriptor[0]), matrix.ptr_to([row, step * columns]),
                    1, 8 * _ROW_BYTES // 16, _SWIZZLE_128,
                )
            )  # fmt: skip
        both = (descriptor[0] for descriptor in descriptors)
        T.evaluate(product(*sums, *both, T.ptx.pred(1), *negate_and_transpose))
    T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())
    T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](0))
    _pin(sums, dtype)


_TYPES = {"float16": "f32.f16.f16", "int8": "s32.s8.s8"}


def position(threads: Threads, register: int) -> tuple[Expr, Expr]:
    """The (row, column) of the product that a register of `acc` has in this thread."""
    row = threads.warp % WARPGROUP * 16 + threads.lane // 4 + register // 2 % 2 * 8
    return row, register // 4 * 8 + threads.lane % 4 * 2 + register % 2


def _pin(sums: list[Expr], dtype: str) -> None:
    """Keep the compiler from moving registers that the tensor cores write while others run."""
    kind, constraint = ("float", "f") if dtype == "float16" else ("unsigned", "r")
    source = (
        f"__device__ __forceinline__ void xpuc_pin_{kind}({kind}& x) "
        f'{{ asm volatile("" : "+{constraint}"(x) :: "memory"); }}\n'
    )
    for value in sums:
        T.evaluate(T.cuda.func_call(f"xpuc_pin_{kind}", value, source_code=source))
