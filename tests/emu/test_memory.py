"""Device memory: what lies outside an allocation is caught, whoever touches it."""

from __future__ import annotations

from ctypes import c_int, c_size_t, c_void_p

import numpy as np
import pytest
from emu.raw import CudaError, Memory, Module, call, synchronize

TOUCH = """
extern "C" __global__ void write(float* x, int i) { x[i] = 1; }
extern "C" __global__ void read(float* x, int i, float* y) { y[0] = x[i]; }
extern "C" __global__ void read4(float* x, int i, float* y) { *(float4*)y = *(float4*)(x + i); }
"""


@pytest.mark.parametrize("index", [0, 99])
def test_inside_is_fine(index):
    x = Memory(100)
    Module(TOUCH).run("write", 1, 1, x, c_int(index))
    assert x.read()[index] == 1


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (-1, "before the start of an allocation of 400 bytes"),
        (100, "past the end of an allocation of 400 bytes"),
        (127, "past the end of an allocation of 400 bytes"),
        (128, "illegal access to 0x[0-9a-f]+, byte 512 of a device allocation of 400 bytes"),
        (10**6, "illegal access to"),
    ],
)
def test_a_write_outside_fails_the_launch(index, message):
    with pytest.raises(CudaError, match=rf"write: .*{message}"):
        Module(TOUCH).run("write", 1, 1, Memory(100), c_int(index))
    # and the next launch starts with a clean slate
    test_inside_is_fine(0)


def test_a_read_outside_finds_poison_or_fails():
    y = Memory(1)
    Module(TOUCH).run("read", 1, 1, Memory.of(np.zeros(100, np.float32)), c_int(100), y)
    assert np.isnan(y.read()[0])
    with pytest.raises(CudaError, match="illegal access"):
        Module(TOUCH).run("read", 1, 1, Memory(100), c_int(128), y)


def test_a_null_pointer_and_freed_memory_fail():
    with pytest.raises(CudaError, match="illegal access to 0x0, which is no device memory"):
        Module(TOUCH).run("write", 1, 1, c_void_p(0), c_int(0))
    x = Memory(4096)
    x.free()
    with pytest.raises(CudaError, match="illegal access"):
        Module(TOUCH).run("write", 1, 1, x, c_int(0))
    with pytest.raises(CudaError, match="freed what was not allocated"):
        x.free()


def test_a_failure_names_the_block_and_the_thread(order):
    source = """
    extern "C" __global__ void k(float* x) {
      if (blockIdx.x == 3 && threadIdx.x == 5) x[1 << 30] = 0;
    }"""
    with pytest.raises(CudaError, match=r"in block \(3, 0, 0\), thread \(5, 0, 0\)"):
        Module(source).run("k", 4, 32, Memory(1))


def test_vector_accesses_must_be_aligned():
    x, y = Memory.of(np.arange(16, dtype=np.float32)), Memory(4)
    Module(TOUCH).run("read4", 1, 1, x, c_int(4), y)
    assert y.read().tolist() == [4, 5, 6, 7]
    with pytest.raises(CudaError, match="misaligned address"):
        Module(TOUCH).run("read4", 1, 1, x, c_int(2), y)


def test_an_index_past_a_local_array_fails():
    source = """
    extern "C" __global__ void k(float* y, int n) {
      float x[4] = {1, 2, 3, 4};
      y[0] = x[n];
    }"""
    y = Memory(1)
    Module(source).run("k", 1, 1, y, c_int(3))
    assert y.read()[0] == 4
    with pytest.raises(CudaError, match="past the end of an array of the thread"):
        Module(source).run("k", 1, 1, y, c_int(4))


def test_endless_recursion_fails_the_launch():
    source = """
    __device__ __noinline__ int deep(int n) {
      volatile int x[64];
      x[n % 64] = n;
      return n < 0 ? 0 : deep(n + 1) + x[n % 64];
    }
    extern "C" __global__ void k(int* y) { y[0] = deep(0); }"""
    with pytest.raises(CudaError, match="illegal access"):
        Module(source).run("k", 1, 1, Memory(1, np.int32))


def test_copies_are_checked():
    x = Memory(4)
    host = np.zeros(8, np.float32)
    with pytest.raises(CudaError, match="reaches outside a device allocation"):
        call("cudaMemcpy", x.pointer, c_void_p(host.ctypes.data), c_size_t(32), 1)
    with pytest.raises(CudaError, match="reaches outside a device allocation"):
        call("cudaMemcpy", c_void_p(host.ctypes.data), c_void_p(host.ctypes.data), c_size_t(4), 1)
    synchronize()


def test_memory_is_finite():
    with pytest.raises(CudaError, match="out of memory"):
        Memory(5 << 30)


SIZES = """
extern "C" __global__ void __launch_bounds__(64) k(float* y) { y[0] = 1; }
extern "C" __global__ void big(float* y) {
  __shared__ float x[WORDS];
  x[0] = 1;
  y[0] = x[0];
}
extern "C" __global__ void dynamic(float* y) {
  extern __shared__ float x[];
  x[threadIdx.x] = 1;
  y[0] = x[0];
}
"""


@pytest.mark.parametrize(
    ("grid", "block", "dynamic_bytes", "message"),
    [
        (0, 32, 0, "grid"),
        ((1, 65536), 32, 0, "grid"),
        (1, 0, 0, "block"),
        (1, (32, 1, 65), 0, "block"),
        (1, 65, 0, r"65 threads, over its __launch_bounds__\(64\)"),
        (1, 32, 49153, "49153 bytes of dynamic shared memory, 49152 allowed"),
    ],
)
def test_bad_sizes_are_refused(grid, block, dynamic_bytes, message):
    module = Module(SIZES.replace("WORDS", "1"))
    with pytest.raises(CudaError, match=message):
        module.launch("k", grid, block, Memory(1), dynamic_bytes=dynamic_bytes)


def test_more_than_1024_threads_are_refused():
    with pytest.raises(CudaError, match="at most 1024 threads"):
        Module(SIZES.replace("WORDS", "1")).launch("big", 1, (1024, 2), Memory(1))


def test_large_shared_memory_must_be_asked_for():
    module = Module(SIZES.replace("WORDS", "1"))
    with pytest.raises(CudaError, match="dynamic shared memory"):
        module.launch("dynamic", 1, 32, Memory(1), dynamic_bytes=200 << 10)
    with pytest.raises(CudaError, match="a block has 232448"):
        module.allow_dynamic_bytes("dynamic", 232449)
    module.allow_dynamic_bytes("dynamic", 200 << 10)
    y = Memory(1)
    module.run("dynamic", 1, 32, y, dynamic_bytes=200 << 10)
    assert y.read()[0] == 1


def test_too_large_shared_arrays_fail_the_launch():
    y = Memory(1)
    Module(SIZES.replace("WORDS", "12288")).run("big", 1, 32, y)
    assert y.read()[0] == 1
    with pytest.raises(CudaError, match="49156 bytes in __shared__ arrays"):
        Module(SIZES.replace("WORDS", "12289")).run("big", 1, 32, y)
