"""What TVM builds, unmodified, on the emulated GPU: both dialects, the Relax VM, CUDA graphs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from emu import fake_driver
from emu.device import MACHINE, InOut, Out, build, device, emulated, run
from tvm import relax, te
from tvm.relax.backend.cuda import pipeline

from xpuc.codegen import cuda
from xpuc.schedules.cuda import tir

RNG = np.random.default_rng(6)


def test_tvm_sees_one_gpu():
    gpu = device()
    assert gpu.exist
    assert not tvm.cuda(1).exist
    assert gpu.compute_version == "9.0"
    assert (gpu.multi_processor_count, gpu.warp_size) == (132, 32)
    assert gpu.max_shared_memory_per_block == 48 * 1024


def test_tensors_travel():
    for dtype in ("float32", "float16", "int8", "uint64"):
        x = (100 * RNG.standard_normal((5, 7))).astype(dtype)
        np.testing.assert_array_equal(tvm.runtime.tensor(x, device()).numpy(), x)


def row_sums(barrier: bool = True):
    """y[r] = sum(x[r]) over 128 columns, a block for each row."""

    def body():
        n = tir.rows_var()
        x = tir.arg("x", (n, 128), "float32")
        y = tir.arg("y", (n,), "float32")
        threads = tir.launch([n], warps=4)
        (row,) = threads.block
        partial = tir.shared(4, "float32")
        total = tir.warp_reduce(tir.load(x, (row, threads.thread)), "sum")
        with tir.when(threads.lane == 0):
            tir.store(partial, threads.warp, total)
        if barrier:
            tir.sync_block()
        with tir.when(threads.thread == 0):
            total = partial[0] + partial[1] + partial[2] + partial[3]
            tir.store(y, row, total)

    return tir.prim_func("row_sums", body)


def test_a_tirx_kernel():
    x = RNG.standard_normal((3, 128)).astype(np.float32)
    (y,) = run(row_sums(), x, Out((3,), "float32"))
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-5, atol=1e-5)


def test_a_tirx_kernel_without_its_barrier_is_caught():
    x = RNG.standard_normal((3, 128)).astype(np.float32)
    with pytest.raises(AssertionError, match="differs with threads in reverse order"):
        run(row_sums(barrier=False), x, Out((3,), "float32"))


def test_a_kernel_that_changes_its_input_is_caught():
    def body():
        x = tir.arg("x", (32,), "float32")
        threads = tir.launch([1], warps=1)
        tir.store(x, threads.lane, tir.const(1, "float32"))

    ones = tir.prim_func("ones", body)
    x = np.zeros(32, np.float32)
    with pytest.raises(AssertionError, match="changed one of its inputs"):
        run(ones, x)
    (y,) = run(ones, InOut(x))
    assert (y == 1).all()


def test_a_failed_launch_is_an_exception_with_the_emulators_words():
    def body():
        y = tir.arg("y", (32,), "float32")
        threads = tir.launch([1], warps=1)
        tir.store(y, threads.lane * (1 << 20), tir.const(1, "float32"))

    with pytest.raises(Exception, match=r"wild_kernel: illegal access to .* in block"):
        run(tir.prim_func("wild", body), Out((32,), "float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats(dtype):
    def body():
        x = tir.arg("x", (64, 8), dtype)
        y = tir.arg("y", (64, 8), dtype)
        threads = tir.launch([2], warps=1)
        at = (threads.block[0] * 32 + threads.lane, 0)
        values = tir.let(tir.load(x, at, 8))
        out = [tir.element(values, i) * tir.const(3, dtype) for i in range(8)]
        for i, value in enumerate(out):
            tir.store(y, (at[0], i), value)

    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = RNG.standard_normal((64, 8)).astype(numpy_dtype)
    (y,) = run(tir.prim_func("triple", body), x, Out((64, 8), dtype))
    np.testing.assert_array_equal(y.view(np.uint16), (x * numpy_dtype.type(3)).view(np.uint16))


def gemm_tile():
    """c = a @ b.T for 16x32 and 8x32 f16 tiles: cp.async, ldmatrix, mma.sync."""

    def body():
        a, b = tir.arg("a", (16, 32), "float16"), tir.arg("b", (8, 32), "float16")
        c = tir.arg("c", (16, 8), "float32")
        threads = tir.launch([1], warps=1)
        lane = threads.lane
        tile_a, tile_b = tir.shared((16, 40), "float16"), tir.shared((8, 40), "float16")
        for i in range(2):
            at = (8 * i + lane // 4, lane % 4 * 8)
            tir.copy_async(tile_a, at, a, at)
        at = (lane // 4, lane % 4 * 8)
        tir.copy_async(tile_b, at, b, at)
        tir.commit_copies()
        tir.wait_copies(0)
        tir.sync_block()
        acc = tir.registers(4, "float32")
        ra, rb = tir.registers(4, "uint32"), tir.registers(4, "uint32")
        for i in range(4):
            tir.store(acc, i, tir.const(0, "float32"))
        tir.load_matrices(rb, 0, 4, tile_b, (lane % 8, lane // 8 * 8))
        for k in range(2):
            tir.load_matrices(ra, 0, 4, tile_a, (lane % 16, 16 * k + lane // 16 * 8))
            tir.mma_f16(acc, 0, [ra[i] for i in range(4)], [rb[2 * k], rb[2 * k + 1]])
        for i in range(4):
            tir.store(c, (lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2), acc[i])

    return tir.prim_func("gemm_tile", body)


def test_tensor_cores():
    a, b = (RNG.standard_normal((n, 32)).astype(np.float16) for n in (16, 8))
    (c,) = run(gemm_tile(), a, b, Out((16, 8), "float32"))
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.T.astype(np.float32), atol=1e-4)


def finished(schedule, name):
    attributes = {"global_symbol": name, "tirx.is_scheduled": True}
    return schedule.mod["main"].with_attr(attributes)


def scheduled_matmul(m: int):
    """c = a @ b.T by a hand schedule: tiles in shared memory, TVM puts the barriers in."""
    n, k = 48, 64
    a, b = te.placeholder((m, k), name="a"), te.placeholder((n, k), name="b")
    reduce = te.reduce_axis((0, k), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, reduce] * b[j, reduce], axis=reduce), name="c")
    function = te.create_prim_func([a, b, c]).with_attr("global_symbol", "matmul")
    schedule = tvm.s_tir.Schedule(function)
    block = schedule.get_sblock("c")
    i, j, step = schedule.get_loops(block)
    row, y = schedule.split(i, [None, 4])
    column, x = schedule.split(j, [None, 16])
    outer, inner = schedule.split(step, [None, 16])
    schedule.reorder(row, column, y, x, outer, inner)
    for loop, thread in ((row, "blockIdx.y"), (column, "blockIdx.x")):
        schedule.bind(loop, thread)
    for loop, thread in ((y, "threadIdx.y"), (x, "threadIdx.x")):
        schedule.bind(loop, thread)
    for operand in (0, 1):
        copy = schedule.cache_read(block, operand, "shared")
        schedule.compute_at(copy, outer)
        fused = schedule.fuse(*schedule.get_loops(copy)[-2:])
        _, ty, tx = schedule.split(fused, [None, 4, 16])
        schedule.bind(ty, "threadIdx.y")
        schedule.bind(tx, "threadIdx.x")
    return finished(schedule, "matmul")


def test_an_s_tir_kernel_with_tiles():
    a = RNG.standard_normal((8, 64)).astype(np.float32)
    b = RNG.standard_normal((48, 64)).astype(np.float32)
    (c,) = run(scheduled_matmul(8), a, b, Out((8, 48), "float32"))
    np.testing.assert_allclose(c, a @ b.T, rtol=1e-4, atol=1e-4)


def scheduled_sums():
    """y[r] = sum(x[r]) for a symbolic number of rows, reduced across the threads of a block."""
    n, reduce = te.var("n", "int64"), te.reduce_axis((0, 256), "k")
    x = te.placeholder((n, 256), name="x")
    y = te.compute((n,), lambda i: te.sum(x[i, reduce], axis=reduce), name="y")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    i, k = schedule.get_loops(schedule.get_sblock("y"))
    _, lanes = schedule.split(k, [None, 64])
    schedule.bind(i, "blockIdx.x")
    schedule.bind(lanes, "threadIdx.x")
    return finished(schedule, "sums")


@pytest.mark.parametrize("n", [1, 6])
def test_an_s_tir_kernel_with_symbolic_rows(n):
    x = RNG.standard_normal((n, 256)).astype(np.float32)
    (y,) = run(scheduled_sums(), x, Out((n,), "float32"))
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-4, atol=1e-4)


def elementwise(name, columns, change):
    """y = change(x), 4 rows, a block for each."""

    def body():
        x, y = tir.arg("x", (4, columns), "float32"), tir.arg("y", (4, columns), "float32")
        threads = tir.launch([4], warps=2)
        with tir.when(threads.thread < columns):
            at = (threads.block[0], threads.thread)
            tir.store(y, at, change(tir.load(x, at)))

    return tir.prim_func(name, body)


def step_module():
    """main(x, w) = 2x @ w.T + 1 by three kernels of both dialects, w a constant of the model."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(n, f32(rows, 64)) for n, rows in (("x", 4), ("w", 48)))
    kernels = [
        (elementwise("doubling", 64, lambda v: v * tir.const(2, "float32")), (4, 64)),
        (scheduled_matmul(4), (4, 48)),
        (elementwise("shift", 48, lambda v: v + tir.const(1, "float32")), (4, 48)),
    ]
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        value = x
        with builder.dataflow():
            for kernel, shape in kernels:
                name = kernel.attrs["global_symbol"]
                operands = [value, w] if name == "matmul" else [value]
                called = relax.call_tir(builder.add_func(kernel, name), operands, f32(*shape))
                value = builder.emit(called)
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def f32(*shape):
    return relax.TensorType(shape, "float32")


def lowering():
    """TVM's own passes for CUDA, without those that schedule, fuse and look into s_tir."""
    _reshapes, *passes = pipeline.dataflow_lower_passes(MACHINE.tvm)
    return tvm.transform.Sequential([*passes, *pipeline.finalize_passes(MACHINE.tvm)])


@pytest.mark.parametrize("graph", [False, True])
def test_the_relax_vm_and_cuda_graphs(graph, order):
    with emulated(), tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": graph}):
        executable = relax.build(
            step_module(), MACHINE.tvm, relax_pipeline=lowering(), tir_pipeline=cuda.PIPELINE
        )
    assert ("cuda_graph.run_or_capture" in executable.as_text()) == graph
    vm = relax.VirtualMachine(executable, device())
    w = RNG.standard_normal((48, 64)).astype(np.float32)
    on_gpu = tvm.runtime.tensor(w, device())
    x = tvm.runtime.empty((4, 64), "float32", device())
    before, graphs = fake_driver.launches("matmul_kernel"), fake_driver.graph_launches()
    for _ in range(3):
        values = RNG.standard_normal((4, 64)).astype(np.float32)
        x.copyfrom(values)
        np.testing.assert_allclose(vm["main"](x, on_gpu).numpy(), 2 * values @ w.T + 1, atol=1e-3)
    assert fake_driver.launches("matmul_kernel") == before + 3
    assert fake_driver.graph_launches() == graphs + (2 if graph else 0)


def test_built_functions_are_called_as_on_a_gpu():
    executable = build(row_sums())
    x = RNG.standard_normal((2, 128)).astype(np.float32)
    y = tvm.runtime.empty((2,), "float32", device())
    executable["row_sums"](tvm.runtime.tensor(x, device()), y)
    np.testing.assert_allclose(y.numpy(), x.sum(1), rtol=1e-5, atol=1e-5)
