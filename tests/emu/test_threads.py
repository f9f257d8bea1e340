"""Threads, barriers, shared memory: a kernel that is right, and one for each mistake."""

from __future__ import annotations

from ctypes import c_int

import numpy as np
import pytest
from emu.raw import CudaError, Memory, Module

SUM = """
extern "C" __global__ void __launch_bounds__(128) block_sum(const float* x, float* y) {
  __shared__ float partial[128];
  partial[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x];
  for (int half = 64; half > 0; half /= 2) {
    BARRIER
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) y[blockIdx.x] = partial[0];
}
"""


def run_sum(barrier: str) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(512, dtype=np.float32)
    y = Memory(4)
    Module(SUM.replace("BARRIER", barrier)).run("block_sum", 4, 128, Memory.of(x), y)
    return y.read(), x.reshape(4, 128).sum(1)


def test_a_reduction_in_shared_memory(order):
    got, expected = run_sum("__syncthreads();")
    np.testing.assert_array_equal(got, expected)


def test_a_missing_barrier_reads_poison():
    got, _ = run_sum("")
    assert np.isnan(got).all()


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_uninitialised_memory_is_poison(order, monkeypatch):
    monkeypatch.setenv("XPUC_EMU_ORDER", order)
    assert np.isnan(Memory(8, np.float16).read()).all()
    assert (Memory(8, np.int32).read() == -1).all()


def test_uninitialised_locals_are_poison():
    source = """
    extern "C" __global__ void k(float* y, int n) {
      float sum[4];
      for (int i = 0; i < n; ++i) sum[i] = 0;
      y[0] = sum[3];
    }"""
    y = Memory(1)
    Module(source).run("k", 1, 1, y, c_int(3))
    assert abs(y.read()[0]) > 1e30
    Module(source).run("k", 1, 1, y, c_int(4))
    assert y.read()[0] == 0


RACE = """
extern "C" __global__ void k(int* y) {
  __shared__ int x[64];
  x[threadIdx.x] = threadIdx.x;
  SYNC
  int left = x[(threadIdx.x + 63) % 64];
  if (threadIdx.x > 0) y[threadIdx.x] = left;
}
"""


def test_a_race_shows_in_another_order(monkeypatch):
    """Without its barrier the kernel is right when threads run in ascending order."""
    results = {}
    for order in ("forward", "reverse", "shuffle"):
        monkeypatch.setenv("XPUC_EMU_ORDER", order)
        for sync in ("", "__syncthreads();"):
            y = Memory(64, np.int32)
            Module(RACE.replace("SYNC", sync)).run("k", 1, 64, y)
            results[order, sync] = (y.read()[1:] == np.arange(63)).all()
    assert results.pop(("reverse", "")) == False  # noqa: E712
    assert results.pop(("shuffle", "")) == False  # noqa: E712
    assert all(results.values())


def test_blocks_run_in_the_order_asked_for(monkeypatch):
    source = """
    extern "C" __global__ void k(unsigned* y, unsigned* next) {
      y[blockIdx.x + gridDim.x * blockIdx.y] = atomicAdd(next, 1u);
    }"""
    seen = {}
    for order in ("forward", "reverse", "shuffle"):
        monkeypatch.setenv("XPUC_EMU_ORDER", order)
        y, following = Memory(12, np.uint32), Memory.of(np.zeros(1, np.uint32))
        Module(source).run("k", (4, 3), 1, y, following)
        seen[order] = y.read().tolist()
    assert seen["forward"] == list(range(12))
    assert seen["reverse"] == list(range(12))[::-1]
    assert sorted(seen["shuffle"]) == list(range(12))
    assert seen["shuffle"] not in (seen["forward"], seen["reverse"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 16) __syncthreads();\n__syncthreads();", "lines 2 and 3"),
        (
            "if (threadIdx.x < 16) __syncthreads(); else __syncwarp(0xffffffffu);",
            "16 wait at __syncthreads, 0 at a named barrier, 16 at a warp operation",
        ),
        (
            "if (threadIdx.x < 32) __shfl_sync(0xffffffffu, 1, 0); else __syncthreads();\n"
            "if (threadIdx.x % 2) __syncwarp(); else __ballot_sync(0xffffffffu, 1);",
            "lanes of one mask are at",
        ),
        ("__syncwarp(1u);", "is not in its mask"),
        ('asm volatile("bar.sync 1, 48;");', "it takes whole warps"),
        ('if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");', "32 at a named barrier"),
    ],
)
def test_divergent_barriers_fail_the_launch(body, message, order):
    source = 'extern "C" __global__ void k() {\n' + body + "\n}\n"
    with pytest.raises(CudaError, match=message):
        Module(source).run("k", 1, 64)


def test_named_barriers_let_two_warps_meet(order):
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int x[96];
      int warp = threadIdx.x / 32;
      if (warp < 2) {
        x[threadIdx.x] = threadIdx.x;
        asm volatile("bar.sync %0, %1;" :: "r"(1), "r"(64) : "memory");
        y[threadIdx.x] = x[63 - threadIdx.x];
      } else {
        asm volatile("bar.sync 2, 32;");
        y[threadIdx.x] = warp;
      }
    }"""
    y = Memory(96, np.int32)
    Module(source).run("k", 1, 96, y)
    assert y.read().tolist() == [*range(63, -1, -1), *[2] * 32]


def test_a_producer_arrives_and_goes_on(order):
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int x[32];
      if (threadIdx.x < 32) {
        x[threadIdx.x] = 7;
        asm volatile("bar.arrive 3, 64;");
      } else {
        asm volatile("bar.sync 3, 64;");
        y[threadIdx.x - 32] = x[63 - threadIdx.x];
      }
    }"""
    y = Memory(32, np.int32)
    Module(source).run("k", 1, 64, y)
    assert (y.read() == 7).all()


def test_threads_that_have_ended_do_not_hold_a_barrier(order):
    source = """
    extern "C" __global__ void k(int* y) {
      if (threadIdx.x >= 40) return;
      __syncthreads();
      y[threadIdx.x] = __shfl_down_sync(0xffffffffu, threadIdx.x, 1);
    }"""
    y = Memory(40, np.int32)
    Module(source).run("k", 1, 64, y)
    got = y.read()
    assert got[:31].tolist() == list(range(1, 32))
    assert got[39] == -1  # of a lane that has ended: poison


def test_shared_arrays_are_static_dynamic_and_of_several_dimensions(order):
    source = """
    extern "C" __global__ void k(float* y, int n) {
      extern __shared__ __align__(16) float dynamic[];
      __shared__ alignas(16) float grid[4][8];
      __shared__ int one;
      if (threadIdx.x == 0) one = 100;
      dynamic[threadIdx.x] = threadIdx.x;
      grid[threadIdx.x / 8][threadIdx.x % 8] = 2 * threadIdx.x;
      __syncthreads();
      int other = 31 - threadIdx.x;
      y[threadIdx.x] = dynamic[other] + grid[other / 8][other % 8] + one;
    }"""
    y = Memory(32)
    Module(source).run("k", 1, 32, y, c_int(32), dynamic_bytes=128)
    assert y.read().tolist() == [3.0 * (31 - i) + 100 for i in range(32)]


def test_a_write_past_a_shared_array_is_caught():
    source = """
    extern "C" __global__ void k(float* y, int n) {
      SHARED
      for (int i = 0; i < n; ++i) x[i] = 0;
      y[0] = x[0];
    }"""
    for shared, dynamic in (("__shared__ float x[32];", 0), ("extern __shared__ float x[];", 128)):
        module = Module(source.replace("SHARED", shared))
        y = Memory(1)
        module.run("k", 1, 1, y, c_int(32), dynamic_bytes=dynamic)
        assert y.read()[0] == 0
        # g++ traps where it knows the array, the gap behind it is looked at in any case
        with pytest.raises(
            CudaError, match=r"past the end of an array|past the dynamic part's end"
        ):
            module.run("k", 1, 1, y, c_int(33), dynamic_bytes=dynamic)


@pytest.mark.parametrize("body", ["while (x[0] == 0) {}", "while (x[0] == 0) __syncwarp();"])
def test_an_endless_loop_fails_the_launch(body, monkeypatch):
    monkeypatch.setenv("XPUC_EMU_BLOCK_SECONDS", "0.05")
    source = f'extern "C" __global__ void k(volatile int* x) {{ {body} }}'
    with pytest.raises(CudaError, match="k: the block takes too long"):
        Module(source).run("k", 2, 32, Memory.of(np.zeros(1, np.int32)))
    Module(source).run("k", 2, 32, Memory.of(np.ones(1, np.int32)))
