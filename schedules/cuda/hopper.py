"""Words for sm_90a alone: tiles copied by the tensor memory accelerator, products of a warpgroup.

A tile is rows of 128 bytes in shared memory, in the order the accelerator writes and the tensor
cores read (swizzled: `Buffer` indices do not find an element). A thread does not copy: one of the
block asks for the tiles of a step, the warps that read them wait, and say when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import Buffer, Expr, T, Threads

WARPGROUP = 4  # warps
ROWS = 64  # of a product of one warpgroup
K = 16  # columns that an instruction multiplies
COLUMNS = 64  # of a tile
MOST_SHARED_BYTES = 227 * 1024  # of a block
_ROW_BYTES = 128
_DESCRIPTOR_UNIT = 16  # bytes that addresses in a matrix descriptor count
_SWIZZLE_128 = 3  # of CUtensorMapSwizzle, and of a matrix descriptor


@dataclass(frozen=True)
class TensorMap:
    """A matrix of f16 in global memory as the accelerator is told of it, by tiles of `rows`."""

    handle: Expr
    rows: int


def tensor_map(matrix: Buffer, tile_rows: int) -> TensorMap:
    """The map of a matrix f16 (rows, columns), made on the host before `launch`.

    A row is a multiple of 16 bytes; at most 256 rows a tile, a multiple of 8.
    """
    rows, columns = matrix.shape
    handle = T.bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap"))
    stride, box, every, plain = columns * 2, (COLUMNS, tile_rows), (1, 1), 0
    encode = T.call_packed(
        "runtime.cuTensorMapEncodeTiled", handle, "float16", 2, matrix.data, columns, rows, stride,
        *box, *every, plain, _SWIZZLE_128, plain, plain,
    )  # fmt: skip
    T.evaluate(encode)
    return TensorMap(handle, tile_rows)


class Ring:
    """Tiles of a matrix on their way, `tiles` side by side a step, `stages` steps at a time.

    One thread calls `fill` for every step from 0 on. All threads of the block call `wait` before
    they multiply a step's tiles, and `release` when they have.
    """

    def __init__(self, threads: Threads, source: TensorMap, *, tiles: int, stages: int) -> None:
        """Make it ready; every thread of the block takes part."""
        self._source, self._stages, self._threads = source, stages, threads
        tile_bytes = stages * tiles * source.rows * _ROW_BYTES
        assert tile_bytes < MOST_SHARED_BYTES, f"{tile_bytes} bytes of tiles do not fit"
        self._tiles, self._barriers = tir.large_shared(
            ((stages, tiles, source.rows, COLUMNS), "float16"), ((2, stages), "uint64")
        )
        with tir.when(threads.thread == 0):
            for stage in range(stages):
                for barrier, arrivals in (
                    (self._full(stage), 1),
                    (self._empty(stage), threads.warps),
                ):
                    count = tir.const(arrivals, "uint32")
                    T.evaluate(T.ptx["mbarrier.init.shared.b64"](barrier, count))
            _show_barriers_to_the_accelerator()
        tir.sync_block()

    def fill(self, step: Expr, row: Expr, column: Expr) -> None:
        """Ask for the step's tiles, the first from (row, column) on; zeros beyond the matrix.

        Waits until the tiles of `stages` steps before are released.
        """
        stage = tir.let(step % self._stages)
        turn = step // self._stages
        T.evaluate(T.cuda.mbarrier_wait(self._empty(stage), (turn + 1) % 2))
        n_tiles = int(self._tiles.shape[1])
        total = tir.const(n_tiles * self._source.rows * _ROW_BYTES, "uint32")
        expect = "mbarrier.arrive.expect_tx.shared.b64"
        T.evaluate(T.ptx[expect](self._full(stage), total))
        copy = T.ptx["cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"]
        handle = T.address_of(self._source.handle)
        for i in range(n_tiles):
            into, at = self._tiles.ptr_to([stage, i, 0, 0]), column + i * COLUMNS
            T.evaluate(copy(into, handle, at, row, self._full(stage)))

    def wait(self, step: Expr) -> None:
        """Until the step's tiles are there."""
        full = self._full(step % self._stages)
        T.evaluate(T.cuda.mbarrier_wait(full, step // self._stages % 2))

    def release(self, step: Expr) -> None:
        """The products of this warp with the step's tiles are made, and waited for."""
        with tir.when(self._threads.lane == 0):
            arrive = T.ptx["mbarrier.arrive.shared.b64"]
            T.evaluate(arrive(self._empty(step % self._stages)))

    def descriptor(self) -> Expr:
        """What names the first tile of step 0 to the tensor cores; `operand` counts from it."""
        word = tir.registers(1, "uint64")
        groups_of_8 = 8 * _ROW_BYTES // _DESCRIPTOR_UNIT
        T.evaluate(
            T.cuda.wgmma.encode_matrix_descriptor(
                T.address_of(word[0]), self._tiles.ptr_to([0, 0, 0, 0]),
                1, groups_of_8, _SWIZZLE_128,
            )
        )  # fmt: skip
        return tir.let(word[0])

    def operand(self, descriptor: Expr, step: Expr, part: int) -> Expr:
        """The descriptor of columns 16 `part` and the next 15 of the step's tiles."""
        tile_bytes = self._source.rows * _ROW_BYTES
        tile, inside = divmod(part * K, COLUMNS)
        bytes_of_stage = tile_bytes * int(self._tiles.shape[1])
        offset = step % self._stages * (bytes_of_stage // _DESCRIPTOR_UNIT)
        offset += (tile * tile_bytes + inside * 2) // _DESCRIPTOR_UNIT
        return descriptor + tir.cast(offset, "uint64")

    def _full(self, stage: Expr) -> Expr:
        return T.address_of(self._barriers[0, stage])

    def _empty(self, stage: Expr) -> Expr:
        return T.address_of(self._barriers[1, stage])


def multiply_add(acc: Buffer, products: Sequence[tuple[Sequence[Expr], Expr]]) -> None:
    """Start acc += a b^T for all `products`, by a warpgroup: a f16 (64, 16) of registers, b (n, 16)
    of tiles.

    An `a` is four uint32 words, laid out in each warp as `tir.mma_f16` has its first factor, 16
    rows a warp; `acc` f32 (n / 2,), where `position` says what is what. None may be touched before
    `wait_products`; what is computed until then may be no factor of the next products, else the
    compiler waits for these at once (ptxas C7513).
    """
    n = int(acc.shape[0]) * 2
    instruction = T.ptx[f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16"]
    add, plain, as_they_are = T.ptx.pred(1), (1, 1), 0
    sums = [acc[i] for i in range(n // 2)]
    _keep_before(acc)
    factors = [_kept_before(a) for a, _ in products]
    _order_registers_before_products()
    for a, (_, b) in zip(factors, products, strict=True):
        T.evaluate(instruction(*sums, *a, b, add, *plain, as_they_are))
    T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())


def wait_products(acc: Buffer) -> None:
    """Until the products this warpgroup started are in `acc`."""
    T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](0))
    _keep_before(acc)


def position(threads: Threads, register: int) -> tuple[Expr, Expr]:
    """The (row, column) of the product that a register of `acc` has in this thread."""
    row = threads.warp % WARPGROUP * 16 + threads.lane // 4 + register // 2 % 2 * 8
    return row, register // 4 * 8 + threads.lane % 4 * 2 + register % 2


def _keep_before(words: Buffer) -> None:
    """Keep the compiler from moving what it does with these registers past this point."""
    kind, constraint = {"float32": ("float", "f"), "uint32": ("unsigned", "r")}[str(words.dtype)]
    source = (
        f"__device__ __forceinline__ void xpuc_keep_{kind}({kind}& x) "
        f'{{ asm volatile("" : "+{constraint}"(x) :: "memory"); }}\n'
    )
    for i in range(int(words.shape[0])):
        T.evaluate(T.cuda.func_call(f"xpuc_keep_{kind}", words[i], source_code=source))


def _kept_before(words: Sequence[Expr]) -> list[Expr]:
    """The words, computed before this point."""
    kept = tir.registers(len(words), "uint32")
    for i, word in enumerate(words):
        tir.store(kept, i, word)
    _keep_before(kept)
    return [kept[i] for i in range(len(words))]


def _show_barriers_to_the_accelerator() -> None:
    """Barriers are initialised by plain stores: the accelerator's arrivals come after them."""
    T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())


def _order_registers_before_products() -> None:
    """Plain writes of factors and sums come before the tensor cores read and write them."""
    T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())
