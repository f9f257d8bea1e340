// What a kernel compiled for the host and the fake driver agree on. Plain C types: the kernel's
// library is loaded into a process that may hold another C++ runtime.
#pragma once
#include <cstddef>
#include <cstdint>

struct EmuDim {
  unsigned x, y, z;
};

// The running CUDA thread, as the kernel sees it.
struct EmuThread {
  EmuDim thread, block, block_dim, grid_dim;
  unsigned lane;    // within the warp
  unsigned linear;  // within the block
  char* shared;     // the block's shared memory; its dynamic part comes first
};

// A kernel's entry in its library: `extern "C" const EmuKernel emu_kernel_NAME`.
struct EmuKernel {
  void (*entry)(void** arguments);
  unsigned n_parameters;
  const unsigned* parameter_bytes;
  unsigned max_threads;  // of __launch_bounds__; 0 where there is none
};

// The driver's CUtensorMap, as cuTensorMapEncodeTiled fills it. Strides in bytes; dimension 0 is
// contiguous.
struct EmuTensorMap {
  char* base;
  uint64_t extent[5], stride[5];
  uint16_t box[5];
  uint16_t rank, element_bytes, swizzle;  // swizzle: log2 of its span in 16-byte units; 0 = none
};
static_assert(sizeof(EmuTensorMap) <= 128, "CUtensorMap has 128 bytes");

// Shared addresses, as the 32-bit ones of PTX: an offset into the block's shared memory, moved so
// that no array has the address 0.
constexpr unsigned kSharedBase = 1024;

// One warp-level operation, called once when all its lanes have arrived. operands[i] is what lane i
// handed in, null where the lane does not take part.
typedef void (*EmuCollective)(void* const operands[32], unsigned mask);

#pragma GCC visibility push(default)
extern "C" {
extern EmuThread* emu_thread;

[[noreturn]] void emu_fault(const char* format, ...);
void emu_block_barrier(unsigned line);
void emu_named_barrier(unsigned id, unsigned n_threads, bool wait);
void emu_collective(unsigned mask, const char* name, EmuCollective run, void* operand);
unsigned emu_live_lanes();
void* emu_shared_array(const void* key, size_t bytes);
void* emu_shared_pointer(unsigned address);

void emu_cp_async(unsigned shared, const void* global, unsigned bytes, unsigned source_bytes);
void emu_cp_async_commit();
void emu_cp_async_wait(unsigned groups_left);
void emu_cp_async_wait_all();

void emu_fence_proxy_async();
void emu_mbarrier_init(unsigned barrier, unsigned count);
void emu_mbarrier_arrive(unsigned barrier, unsigned expect_bytes);
void emu_mbarrier_expect(unsigned barrier, unsigned bytes);
bool emu_mbarrier_try_wait(unsigned barrier, unsigned parity);
void emu_tma_load(unsigned shared, const void* tensor_map, const int* coordinates, unsigned barrier);
void emu_tma_store(unsigned shared, const void* tensor_map, const int* coordinates);
void emu_tma_store_commit();
void emu_tma_store_wait(unsigned groups_left);

enum EmuElement { EMU_F16, EMU_BF16, EMU_S8, EMU_U8 };
void emu_ldmatrix(unsigned count, bool transposed, unsigned address, uint32_t* out);
void emu_mma_float(EmuElement element, unsigned k, float* c, const uint32_t* a, const uint32_t* b);
void emu_mma_int(EmuElement element, unsigned k, uint32_t* c, const uint32_t* a, const uint32_t* b);
void emu_wgmma_float(EmuElement element, unsigned n, float* const* d, const uint32_t* a_registers,
                     uint64_t a, uint64_t b, bool accumulate, int sign_a, int sign_b);
void emu_wgmma_int(EmuElement element, unsigned n, uint32_t* const* d, const uint32_t* a_registers,
                   uint64_t a, uint64_t b, bool accumulate);
void emu_wgmma_fence();
void emu_wgmma_commit();
void emu_wgmma_wait(unsigned groups_left);
}
#pragma GCC visibility pop
