"""cp.async, mbarriers and TMA: right when waited for, poison when not."""

from __future__ import annotations

import re
from ctypes import c_int

import numpy as np
import pytest
from emu.ptx import UnsupportedPtx, translate
from emu.raw import CudaError, Memory, Module, tensor_map

CP_ASYNC = """
extern "C" __global__ void k(const float4* x, float4* y) {
  __shared__ float4 tile[2][32];
  for (int stage = 0; stage < 2; ++stage) {
    unsigned to = __cvta_generic_to_shared(&tile[stage][threadIdx.x]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(to), "l"(x + 32 * stage + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;");
  }
  WAIT
  __syncthreads();
  y[threadIdx.x] = tile[0][31 - threadIdx.x];
  y[32 + threadIdx.x] = tile[1][31 - threadIdx.x];
}
"""


@pytest.mark.parametrize(
    ("wait", "arrived"),
    [
        ("cp.async.wait_group 0;", [True, True]),
        ("cp.async.wait_all;", [True, True]),
        ("cp.async.wait_group 1;", [True, False]),
        ("cp.async.wait_group 2;", [False, False]),
        ("", [False, False]),
    ],
)
def test_cp_async_completes_when_it_is_waited_for(wait, arrived, order):
    x = np.random.default_rng(4).standard_normal((2, 32, 4)).astype(np.float32)
    y = Memory((2, 32, 4))
    statement = f'asm volatile("{wait}" ::: "memory");' if wait else ""
    Module(CP_ASYNC.replace("WAIT", statement)).run("k", 1, 32, Memory.of(x), y)
    for got, sent, there in zip(y.read(), x[:, ::-1], arrived, strict=True):
        assert (got == sent).all() if there else np.isnan(got).all()


def test_cp_async_fills_with_zeros_and_wants_alignment():
    source = """
    extern "C" __global__ void k(const char* x, float* y, int offset, int bytes) {
      __shared__ float4 tile;
      unsigned to = __cvta_generic_to_shared(&tile);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\\n"
                   "cp.async.wait_all;" :: "r"(to), "l"(x + offset), "r"(bytes));
      ((float4*)y)[0] = tile;
    }"""
    x, y = Memory.of(np.arange(1, 9, dtype=np.float32)), Memory(4)
    Module(source).run("k", 1, 1, x, y, c_int(16), c_int(8))
    assert y.read().tolist() == [5, 6, 0, 0]
    with pytest.raises(CudaError, match=r"misaligned address: .* of 16 bytes"):
        Module(source).run("k", 1, 1, x, y, c_int(8), c_int(8))


TMA = """
__device__ void wait(unsigned barrier, int phase) {
  asm volatile("{ .reg .pred P1; LAB_WAIT: "
               "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1; "
               "@P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }" :: "r"(barrier), "r"(phase));
}
extern "C" __global__ void k(const __grid_constant__ CUtensorMap from,
                             const __grid_constant__ CUtensorMap to, float* y) {
  __shared__ __align__(1024) float tile[ROWS * COLUMNS];
  __shared__ unsigned long long full;
  unsigned barrier = __cvta_generic_to_shared(&full), at = __cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    INIT
    FENCED
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(EXPECT));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(at), "l"(&from), "r"(X), "r"(Y), "r"(barrier) : "memory");
  }
  WAIT
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32) y[i] = tile[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"(&to), "r"(X), "r"(Y), "r"(at) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    STORED
  }
}
"""
PARTS = {
    "ROWS": "8",
    "COLUMNS": "32",
    "FENCED": 'asm volatile("fence.proxy.async.shared::cta;");',
    "INIT": 'asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(1));',
    "EXPECT": "8 * 32 * 4",
    "X": "32",
    "Y": "6",
    "WAIT": "wait(barrier, 0);",
    "STORED": 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");',
}
IMAGE = np.arange(20 * 48, dtype=np.float32).reshape(20, 48)


def tma(swizzle: int = 0, **parts: str) -> tuple[np.ndarray, np.ndarray]:
    """The tile as it lies in shared memory, and what was stored from it."""
    source = re.sub(rf"\b({'|'.join(PARTS)})\b", lambda m: {**PARTS, **parts}[m[0]], TMA)
    image, copy, y = Memory.of(IMAGE), Memory.of(np.zeros_like(IMAGE)), Memory((8, 32))
    maps = [tensor_map(memory, (8, 32), swizzle=swizzle) for memory in (image, copy)]
    Module(source).run("k", 1, 32, *maps, y)
    return y.read(), copy.read()


def test_tma_loads_and_stores_a_tile_with_zeros_outside(order):
    tile, copy = tma()
    expected = np.zeros((8, 32), np.float32)
    expected[:, :16] = IMAGE[6:14, 32:]
    np.testing.assert_array_equal(tile, expected)
    expected = np.zeros_like(IMAGE)
    expected[6:14, 32:] = IMAGE[6:14, 32:]
    np.testing.assert_array_equal(copy, expected)


def test_tma_swizzles_16_byte_units():
    tile, copy = tma(swizzle=3, X="0")
    units = IMAGE[6:14, :32].reshape(8, 8, 4)
    for row, unit in np.ndindex(8, 8):
        np.testing.assert_array_equal(tile.reshape(8, 8, 4)[row, unit ^ row], units[row, unit])
    np.testing.assert_array_equal(copy[6:14, :32], IMAGE[6:14, :32])


def test_a_tma_load_that_is_not_waited_for_is_poison():
    tile, _ = tma(WAIT="__syncthreads();")
    assert np.isnan(tile).all()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"INIT": ""}, "was not initialised"),
        ({"FENCED": ""}, "no fence.proxy.async after its mbarrier"),
        ({"EXPECT": "8 * 32 * 4 + 1"}, "32 for an mbarrier"),
        ({"WAIT": "wait(barrier, 0); wait(barrier, 1);"}, "32 for an mbarrier"),
        ({"STORED": ""}, "before its cp.async.bulk stores were waited for"),
    ],
)
def test_mistakes_with_tma_fail_the_launch(parts, message, order):
    with pytest.raises(CudaError, match=message):
        tma(**parts)


def test_an_mbarrier_counts_arrivals_over_phases(order):
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ unsigned long long full;
      __shared__ int x[64];
      unsigned barrier = __cvta_generic_to_shared(&full);
      if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(64));
      __syncthreads();
      int sum = 0;
      for (int phase = 0; phase < 4; ++phase) {
        x[threadIdx.x] = phase + threadIdx.x;
        asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" :: "r"(barrier));
        int done = 0;
        while (!done)
          asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2;"
                       "selp.b32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(phase & 1));
        sum += x[63 - threadIdx.x];
        __syncthreads();
      }
      y[threadIdx.x] = sum;
    }"""
    y = Memory(64, np.int32)
    Module(source).run("k", 1, 64, y)
    assert y.read().tolist() == [4 * (63 - i) + 6 for i in range(64)]


def test_an_unknown_instruction_is_refused_when_the_kernel_is_compiled():
    with pytest.raises(UnsupportedPtx, match=r"tcgen05\.alloc"):
        translate('asm volatile("tcgen05.alloc.cta_group::1 [%0], 32;" :: "r"(x));')


def test_generic_loads_stores_and_bit_instructions(order):
    source = """
    extern "C" __global__ void k(const unsigned* x, unsigned* y) {
      unsigned a, b, c, d, p;
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(x + 4 * threadIdx.x) : "memory");
      asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(p) : "r"(a), "r"(b), "r"(c));
      asm("prmt.b32 %0, %0, %1, 0x0123;" : "+r"(p) : "r"(0));
      asm volatile("st.global.v2.u32 [%0 + 4], {%1, %2};" :: "l"((char*)(y + 2 * threadIdx.x) - 4),
                   "r"(p), "r"(d) : "memory");
    }"""
    x = np.random.default_rng(5).integers(0, 2**32, (32, 4)).astype(np.uint32)
    y = Memory((32, 2), np.uint32)
    Module(source).run("k", 1, 32, Memory.of(x), y)
    a, b, c, d = x.T
    np.testing.assert_array_equal(y.read(), np.stack([(a & b | c).byteswap(), d], 1))
