"""Small GPU kernels that between them use every word of `schedules/cuda/tir.py`."""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.cuda import hopper, tir


def rms_norm(d: int, eps: float = 1e-5, warps: int = 8) -> tirx.PrimFunc:
    """y = x / rms(x) * w for rows of `d` f32, a block a row, four elements a thread at a time."""
    assert d % (4 * 32 * warps) == 0
    steps = d // (4 * 32 * warps)

    def body() -> None:
        n = tir.rows_var()
        x, w = tir.arg("x", (n, d), "float32"), tir.arg("w", (d,), "float32")
        y = tir.arg("y", (n, d), "float32")
        threads = tir.launch((n,), warps)
        starts = [tir.let((s * warps * 32 + threads.thread) * 4) for s in range(steps)]
        parts = [tir.let(tir.load(x, (threads.block[0], c), 4)) for c in starts]
        squares = tir.const(0, "float32")
        for part in parts:
            for i in range(4):
                value = tir.element(part, i)
                squares = tir.let(tir.fma(value, value, squares))
        mean = tir.block_reduce(threads, squares, "sum") / tir.const(d, "float32")
        inverse = tir.let(tir.T.rsqrt(mean + tir.const(eps, "float32")))
        for c, part in zip(starts, parts, strict=True):
            by = tir.let(tir.load(w, c, 4))
            scaled = [tir.element(part, i) * inverse * tir.element(by, i) for i in range(4)]
            tir.store(y, (threads.block[0], c), tir.vector(scaled), 4)

    return tir.prim_func(f"rms_norm_{d}", body)


def q4_0_mat_vec(rows: int, columns: int, warps: int = 4) -> tirx.PrimFunc:
    """y = W x: W of GGUF's Q4_0 blocks (uint16, 9 to a block), a warp a row, a block a lane.

    x is int8 (uint32 words) with a scale and a sum, both f32, for every 32.
    """
    blocks = columns // 32

    def body() -> None:
        w = tir.arg("w", (rows, blocks * 9), "uint16")
        xq = tir.arg("xq", (columns // 4,), "uint32")
        x_scale, x_sum = (tir.arg(name, (blocks,), "float32") for name in ("x_scale", "x_sum"))
        y = tir.arg("y", (rows,), "float32")
        threads = tir.launch((rows // warps,), warps)
        row = tir.let(threads.block[0] * warps + threads.warp)
        total = tir.registers(1, "float32")
        tir.store(total, 0, tir.const(0, "float32"))
        with tir.serial(0, -(-blocks // 32)) as step:
            block = tir.let(step * 32 + threads.lane)
            with tir.when(block < blocks):
                _add_block(w, xq, x_scale, x_sum, total, row, block)
        total_of_row = tir.warp_reduce(tir.load(total, 0), "sum")
        with tir.when(threads.lane == 0):
            tir.store(y, row, total_of_row)

    return tir.prim_func(f"q4_0_mat_vec_{rows}x{columns}", body)


def _add_block(
    w: tir.Buffer, xq: tir.Buffer, x_scale: tir.Buffer, x_sum: tir.Buffer,
    total: tir.Buffer, row: tir.Expr, block: tir.Expr,
) -> None:  # fmt: skip
    """total += d (scale * q.xq - 8 sum) of one block."""
    halves = [tir.let(tir.load(w, (row, block * 9 + i))) for i in range(9)]
    low = [tir.let(tir.load(xq, block * 8 + at, 4)) for at in (0, 4)]
    dot = tir.const(0, "int32")
    for i in range(4):
        pair = [tir.cast(h, "uint32") for h in halves[1 + 2 * i : 3 + 2 * i]]
        word = tir.let(pair[0] | (pair[1] << tir.const(16, "uint32")))
        for x, shift in zip(low, (0, 4), strict=True):
            nibbles = (word >> tir.const(shift, "uint32")) & tir.const(0x0F0F0F0F, "uint32")
            dot = tir.let(tir.dp4a(nibbles, tir.element(x, i), dot))
    d = tir.cast(tir.bits(halves[0], "float16"), "float32")
    eight = tir.const(-8, "float32") * tir.load(x_sum, block)
    inner = tir.fma(tir.load(x_scale, block), tir.cast(dot, "float32"), eight)
    tir.store(total, 0, tir.fma(d, inner, tir.load(total, 0)))


def tile_product(k: int) -> tirx.PrimFunc:
    """c (16, 8) f32 = a (16, k) b (8, k)^T, both f16, by one warp; s (16, 8) int32 of their bytes.

    With the fast exponential of c, a sum across lanes, and f16 stores: words no other kernel has.
    """

    def body() -> None:
        a, b = tir.arg("a", (16, k), "float16"), tir.arg("b", (8, k), "float16")
        c, s = tir.arg("c", (16, 8), "float32"), tir.arg("s", (16, 8), "int32")
        rounded = tir.arg("rounded", (32, 8), "float16")
        threads = tir.launch((1,), 1)
        lane = threads.lane
        tile_a, tile_b = tir.shared((16, 16), "float16"), tir.shared((8, 16), "float16")
        acc, sums = tir.registers(4, "float32"), tir.registers(4, "uint32")
        ra, rb = tir.registers(4, "uint32"), tir.registers(2, "uint32")
        for i in range(4):
            tir.store(acc, i, tir.const(0, "float32"))
            tir.store(sums, i, tir.const(0, "uint32"))
        with tir.serial(0, k // 16) as step:
            column = lane % 2 * 8
            tir.copy_async(tile_a, (lane // 2, column), a, (lane // 2, step * 16 + column))
            with tir.when(lane < 16):
                tir.copy_async(tile_b, (lane // 2, column), b, (lane // 2, step * 16 + column))
            tir.commit_copies()
            tir.wait_copies(0)
            tir.sync_block()
            tir.load_matrices(ra, 0, 4, tile_a, (lane % 16, lane // 16 * 8))
            tir.load_matrices(rb, 0, 2, tile_b, (lane % 8, lane % 16 // 8 * 8))
            operands = [ra[i] for i in range(4)], [rb[i] for i in range(2)]
            tir.mma_f16(acc, 0, *operands)
            tir.mma_s8(sums, 0, *operands)
            tir.sync_warp()
        for i in range(4):
            at = (lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2)
            power = tir.fast_divide(tir.fast_exp2(acc[i]), tir.shuffle(acc[i], lane // 2))
            tir.store(c, at, power + tir.shuffle_xor(acc[i], 1))
            tir.store(s, at, tir.bits(sums[i], "int32") + tir.round_even(acc[i]))
        halves = tir.vector([tir.cast(acc[i % 4], "float16") for i in range(8)])
        tir.store(rounded, (lane, 0), halves, 8)

    return tir.prim_func(f"tile_product_{k}", body)


def contraction(fused: bool) -> tirx.PrimFunc:
    """y = a * b + c, fused or not, and y = y / c: 256 f32."""

    def body() -> None:
        a, b, c, y = (tir.arg(name, (256,), "float32") for name in "abcy")
        i = tir.launch((1,), 8).thread
        values = [tir.load(buffer, i) for buffer in (a, b, c)]
        total = tir.fma(*values) if fused else values[0] * values[1] + values[2]
        tir.store(y, i, tir.let(total) / values[2])

    return tir.prim_func("fused" if fused else "unfused", body)


def hopper_product(n: int, k: int, warpgroups: int = 2) -> tirx.PrimFunc:
    """c f32 = a (m, k) b (n, k)^T of f16 by tiles of 64 `warpgroups` rows; whole tiles of k."""
    rows = hopper.ROWS * warpgroups

    def body() -> None:
        m = tir.rows_var("m")
        a, b = tir.arg("a", (m, k), "float16"), tir.arg("b", (n, k), "float16")
        c = tir.arg("c", (m, n), "float32")
        source, words = hopper.tensor_map(b, n), tir.view(a, (m, k // 2), "uint32")
        threads = tir.launch((tir.floordiv(m + rows - 1, rows),), warpgroups * hopper.WARPGROUP)
        ring = hopper.Ring(threads, source, tiles=1, stages=2)
        tiles = ring.descriptor()
        acc = tir.registers(n // 2, "float32")
        for i in range(n // 2):
            tir.store(acc, i, tir.const(0, "float32"))
        first = tir.let(threads.block[0] * rows + threads.warp // hopper.WARPGROUP * hopper.ROWS)

        def factor(column: tir.Expr) -> list[tir.Expr]:
            row, pair = hopper.position(threads, 0)
            at = [tir.minimum(first + row + 8 * half, m - 1) for half in (0, 1)]
            return [words[r, (column + pair) // 2 + by] for by in (0, 4) for r in at]

        with tir.serial(0, k // hopper.COLUMNS) as step:
            with tir.when(threads.thread == 0):
                ring.fill(step, 0, step * hopper.COLUMNS)
            ring.wait(step)
            parts = range(hopper.COLUMNS // hopper.K)
            columns = [step * hopper.COLUMNS + part * hopper.K for part in parts]
            operands = [ring.operand(tiles, step, part) for part in parts]
            hopper.multiply_add(acc, list(zip(map(factor, columns), operands, strict=True)))
            hopper.wait_products(acc)
            ring.release(step)
        for i in range(n // 2):
            row, column = hopper.position(threads, i)
            with tir.when(first + row < m):
                tir.store(c, (first + row, column), acc[i])

    return tir.prim_func(f"hopper_product_{n}x{k}", body)
