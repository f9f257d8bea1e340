#include "shared_memory.h"

#include <sys/mman.h>

#include <cstring>

#include "kernel_abi.h"
#include "memory.h"

namespace {
constexpr size_t kMapped = 256 * 1024;  // a wgmma descriptor reaches as far
constexpr size_t kGuardBytes = 64;

size_t align(size_t offset, size_t to) { return (offset + to - 1) / to * to; }
}  // namespace

void SharedMemory::reset(size_t dynamic_bytes) {
  if (!base_) base_ = map_between_guard_pages(kMapped);
  arrays_.clear();
  guards_.clear();
  static_bytes_ = 0;
  dynamic_bytes_ = used_ = dynamic_bytes;
  memset(base_, kPoison, dynamic_bytes);
  if (dynamic_bytes) guard(base_ + dynamic_bytes);
}

void* SharedMemory::array(const void* key, size_t bytes) {
  for (const Array& array : arrays_) {
    if (array.key == key) return array.begin;
  }
  static_bytes_ += bytes;
  if (static_bytes_ > kMostStaticBytes) {
    emu_fault("%zu bytes in __shared__ arrays: a kernel has 49152", static_bytes_);
  }
  size_t begin = align(used_, bytes >= 1024 ? 1024 : 128);  // 1024: a 128-byte swizzle's tile
  if (static_bytes_ + dynamic_bytes_ > kMostBytes || begin + bytes + kGuardBytes > kMapped) {
    emu_fault("%zu bytes of shared memory: a block has %zu", static_bytes_ + dynamic_bytes_,
              kMostBytes);
  }
  arrays_.push_back({key, base_ + begin, bytes});
  memset(base_ + begin, kPoison, bytes);
  used_ = begin + bytes;
  guard(base_ + used_);
  return base_ + begin;
}

void SharedMemory::guard(char* end) {
  memset(end, kPoison, kGuardBytes);
  guards_.push_back(end);
  used_ += kGuardBytes;
}

void* SharedMemory::pointer(unsigned address) const {
  if (address < kSharedBase || address - kSharedBase >= used_) {
    emu_fault("shared address 0x%x is outside the block's shared memory", address);
  }
  return base_ + (address - kSharedBase);
}

std::string SharedMemory::overrun() const {
  for (size_t i = 0; i < guards_.size(); ++i) {
    if (is_poison(guards_[i], kGuardBytes)) continue;
    bool dynamic = dynamic_bytes_ && i == 0;
    if (dynamic) return "shared memory was written past the dynamic part's end";
    const Array& array = arrays_[i - (dynamic_bytes_ ? 1 : 0)];
    return "shared memory was written past the end of an array of " + std::to_string(array.bytes) +
           " bytes";
  }
  return "";
}
