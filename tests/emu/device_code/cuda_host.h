// What CUDA C finds predefined, for a kernel compiled for the host. The translated source includes
// this alone; it is precompiled.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../driver/kernel_abi.h"
#include "small_floats.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#define threadIdx (emu_thread->thread)
#define blockIdx (emu_thread->block)
#define blockDim (emu_thread->block_dim)
#define gridDim (emu_thread->grid_dim)
#define warpSize 32

#define EMU_EXPORT __attribute__((visibility("default")))

#define CUDART_INF_F __builtin_huge_valf()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_huge_val()
#define CUDART_NAN __builtin_nan("")

struct alignas(128) CUtensorMap {
  unsigned long long opaque[16];
};

#include "arithmetic.h"
#include "atomics.h"
#include "vectors.h"
#include "half_intrinsics.h"
#include "ptx.h"
#include "warp.h"
