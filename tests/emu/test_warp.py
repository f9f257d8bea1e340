"""Shuffles, votes and atomics against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from emu.raw import Memory, Module

LANES = np.arange(32)
HALF = LANES % 16
SHUFFLES = [
    ("__shfl_sync(m, x, 3)", np.full(32, 3)),
    ("__shfl_sync(m, x, 3, 8)", LANES // 8 * 8 + 3),
    ("__shfl_sync(m, x, lane + 1)", (LANES + 1) % 32),
    ("__shfl_up_sync(m, x, 1)", np.maximum(LANES - 1, 0)),
    ("__shfl_up_sync(m, x, 2, 16)", np.where(HALF < 2, LANES, LANES - 2)),
    ("__shfl_down_sync(m, x, 4)", np.where(LANES > 27, LANES, LANES + 4)),
    ("__shfl_down_sync(m, x, 1, 16)", np.where(HALF == 15, LANES, LANES + 1)),
    ("__shfl_xor_sync(m, x, 16)", LANES ^ 16),
    ("__shfl_xor_sync(m, x, 5, 8)", LANES ^ 5),
]
VOTES = [
    ("__ballot_sync(m, lane % 3 == 0)", np.full(32, sum(1 << i for i in range(0, 32, 3)))),
    ("__any_sync(m, lane == 31)", np.ones(32)),
    ("__all_sync(m, lane < 31)", np.zeros(32)),
    ("__all_sync(m, lane < 32)", np.ones(32)),
    ("__reduce_add_sync(m, lane)", np.full(32, 496)),
    ("__reduce_max_sync(m, 5 - lane)", np.full(32, 5)),
    ("__reduce_min_sync(m, 5 - lane)", np.full(32, -26)),
    ("__reduce_or_sync(m, 1u << lane % 4)", np.full(32, 15)),
]


@pytest.mark.parametrize(("expression", "expected"), SHUFFLES + VOTES)
def test_warp_operations(expression, expected, order):
    source = f"""
    extern "C" __global__ void k(long long* y) {{
      unsigned m = 0xffffffffu;
      int lane = threadIdx.x % 32, x = lane;
      y[threadIdx.x] = {expression};
    }}"""
    y = Memory(64, np.int64)
    Module(source).run("k", 1, 64, y)
    np.testing.assert_array_equal(y.read(), np.concatenate([expected, expected]))


@pytest.mark.parametrize("type_", ["double", "half", "float4"])
def test_values_of_any_size_are_shuffled(type_, order):
    make = "make_float4(x, x, x, x)" if type_ == "float4" else f"{type_}(x)"
    read = ".w" if type_ == "float4" else ""
    source = f"""
    extern "C" __global__ void k(float* y) {{
      float x = threadIdx.x;
      y[threadIdx.x] = float(__shfl_xor_sync(0xffffffffu, {make}, 1){read});
    }}"""
    y = Memory(32)
    Module(source).run("k", 1, 32, y)
    np.testing.assert_array_equal(y.read(), LANES ^ 1)


def test_a_lane_outside_the_mask_gives_poison(order):
    source = """
    extern "C" __global__ void k(float* y) {
      if (threadIdx.x < 8) y[threadIdx.x] = __shfl_sync(0xffu, float(threadIdx.x), threadIdx.x + 4);
    }"""
    y = Memory(8)
    Module(source).run("k", 1, 32, y)
    got = y.read()
    assert got[:4].tolist() == [4, 5, 6, 7]
    assert np.isnan(got[4:]).all()


def test_parts_of_a_warp_go_their_own_ways(order):
    source = """
    extern "C" __global__ void k(int* y) {
      int lane = threadIdx.x, x = lane;
      if (lane < 16) for (int i = 1; i < 16; i *= 2) x += __shfl_xor_sync(0xffffu, x, i);
      else x = __ballot_sync(0xffff0000u, lane % 2);
      __syncwarp();
      y[lane] = x;
    }"""
    y = Memory(32, np.int32)
    Module(source).run("k", 1, 32, y)
    odd = np.uint32(0xAAAA0000).astype(np.int32)
    np.testing.assert_array_equal(y.read(), np.where(LANES < 16, 120, odd))


def test_atomics(order):
    source = """
    extern "C" __global__ void k(int* i, unsigned* u, float* f, half* h) {
      int n = blockIdx.x * 32 + threadIdx.x;
      atomicAdd(&i[0], n);
      atomicMax(&i[1], n);
      atomicMin(&i[2], -n);
      atomicCAS(&i[3], 0, n + 1);
      atomicExch(&i[4], 9);
      atomicOr(&u[0], 1u << threadIdx.x);
      atomicInc(&u[1], 9u);
      atomicAdd(f, 0.5f);
      atomicAdd(h, half(1));
    }"""
    i, u = Memory.of(np.zeros(5, np.int32)), Memory.of(np.zeros(2, np.uint32))
    f, h = Memory.of(np.zeros(1, np.float32)), Memory.of(np.zeros(1, np.float16))
    Module(source).run("k", 2, 32, i, u, f, h)
    total, most, least, first, last = i.read()
    assert (total, most, least, last) == (2016, 63, -63, 9)
    assert 1 <= first <= 64
    assert u.read().tolist() == [0xFFFFFFFF, 4]
    assert (f.read()[0], h.read()[0]) == (32, 64)
