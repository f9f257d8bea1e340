// cp.async, mbarriers and TMA. A copy happens when it is waited for, as late as the hardware may:
// until then its destination is poison.
#include <cstring>

#include "block.h"
#include "memory.h"

namespace {

void complete(const Copy& copy) {
  memcpy(copy.to, copy.from, copy.source_bytes);
  memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

unsigned elements(const EmuTensorMap& map) {
  unsigned n = 1;
  for (unsigned i = 0; i < map.rank; ++i) n *= map.box[i];
  return n;
}

// Where swizzling moves the 16-byte unit of a shared address: its low bits are XORed with those of
// its 128-byte line.
unsigned swizzled(unsigned address, unsigned swizzle) {
  unsigned units = (1u << swizzle) - 1;
  return address ^ ((address >> 7 & units) << 4);
}

// The element's place in global memory, null outside the tensor.
char* element(const TileCopy& copy, unsigned index) {
  const EmuTensorMap& map = copy.map;
  int64_t offset = 0;
  for (unsigned i = 0; i < map.rank; ++i) {
    int64_t at = copy.at[i] + int64_t(index % map.box[i]);
    index /= map.box[i];
    if (at < 0 || uint64_t(at) >= map.extent[i]) return nullptr;
    offset += at * int64_t(i ? map.stride[i] : map.element_bytes);
  }
  return map.base + offset;
}

template <class Visit>
void each_element(const TileCopy& copy, Visit visit) {
  unsigned bytes = copy.map.element_bytes;
  for (unsigned i = 0; i < elements(copy.map); ++i) {
    // Offsets are relative to an arena aligned to 1024, so the address can be swizzled itself.
    unsigned address = swizzled(copy.shared + i * bytes, copy.map.swizzle);
    visit(static_cast<char*>(emu_shared_pointer(address)), element(copy, i), bytes);
  }
}

void complete(const TileCopy& copy) {
  each_element(copy, [&](char* shared, char* global, unsigned bytes) {
    if (copy.load && global) memcpy(shared, global, bytes);
    if (copy.load && !global) memset(shared, 0, bytes);
    if (!copy.load && global) memcpy(global, shared, bytes);
  });
}

TileCopy tile_copy(bool load, unsigned shared, const void* tensor_map, const int* coordinates) {
  TileCopy copy{};
  copy.load = load;
  copy.shared = shared;
  memcpy(&copy.map, tensor_map, sizeof copy.map);
  if (copy.map.rank < 1 || copy.map.rank > 5) emu_fault("TMA: this is no tensor map");
  if (shared % 128) {
    emu_fault("misaligned address: TMA at shared 0x%x, not a multiple of 128", shared);
  }
  memcpy(copy.at, coordinates, copy.map.rank * sizeof(int));
  return copy;
}

template <class T>
void commit(CopyGroups<T>& groups) {
  groups.committed.push_back(std::move(groups.open));
  groups.open.clear();
}

template <class T>
void wait(CopyGroups<T>& groups, unsigned groups_left) {
  while (groups.committed.size() > groups_left) {
    for (const T& copy : groups.committed.front()) complete(copy);
    groups.committed.erase(groups.committed.begin());
  }
}

Mbarrier& mbarrier(unsigned address) {
  auto found = running_block().mbarriers.find(address);
  if (found == running_block().mbarriers.end()) {
    emu_fault("the mbarrier at shared address 0x%x was not initialised", address);
  }
  return found->second;
}

void settle(unsigned address, Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase = !barrier.phase;
  barrier.pending = barrier.count;
  running_block().release_mbarrier(address);
}

}  // namespace

extern "C" {

void emu_cp_async(unsigned shared, const void* global, unsigned bytes, unsigned source_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) emu_fault("cp.async of %u bytes", bytes);
  if (source_bytes > bytes) emu_fault("cp.async of %u bytes from %u", bytes, source_bytes);
  if (shared % bytes || reinterpret_cast<uintptr_t>(global) % bytes) {
    emu_fault("misaligned address: cp.async of %u bytes", bytes);
  }
  char* to = static_cast<char*>(emu_shared_pointer(shared));
  memset(to, kPoison, bytes);
  running_fiber()->copies.open.push_back(
      {to, static_cast<const char*>(global), bytes, source_bytes});
}

void emu_cp_async_commit() { commit(running_fiber()->copies); }
void emu_cp_async_wait(unsigned groups_left) { wait(running_fiber()->copies, groups_left); }
void emu_cp_async_wait_all() {
  commit(running_fiber()->copies);
  wait(running_fiber()->copies, 0);
}

void emu_mbarrier_init(unsigned address, unsigned count) {
  if (address % 8) emu_fault("misaligned address: an mbarrier has 8 bytes");
  emu_shared_pointer(address);
  running_block().mbarriers[address] = {count, count, 0, false, {}, running_fiber()};
}

void emu_fence_proxy_async() {
  for (auto& [address, barrier] : running_block().mbarriers) {
    if (barrier.unfenced == running_fiber()) barrier.unfenced = nullptr;
  }
}

void emu_mbarrier_expect(unsigned address, unsigned bytes) {
  Mbarrier& barrier = mbarrier(address);
  barrier.bytes += bytes;
}

void emu_mbarrier_arrive(unsigned address, unsigned expect_bytes) {
  Mbarrier& barrier = mbarrier(address);
  if (barrier.pending == 0) emu_fault("an arrival too many at an mbarrier");
  barrier.bytes += expect_bytes;
  --barrier.pending;
  settle(address, barrier);
}

// Waits until the phase of this parity is over; never gives up, as the hardware may.
bool emu_mbarrier_try_wait(unsigned address, unsigned parity) {
  Mbarrier& barrier = mbarrier(address);
  for (;;) {
    if (barrier.phase != bool(parity & 1)) return true;
    std::vector<TileCopy> loads = std::move(barrier.loads);
    barrier.loads.clear();
    for (const TileCopy& copy : loads) {
      complete(copy);
      barrier.bytes -= int64_t(elements(copy.map)) * copy.map.element_bytes;
    }
    if (!loads.empty()) settle(address, barrier);
    if (barrier.phase == bool(parity & 1)) running_block().wait_for_mbarrier(address);
  }
}

void emu_tma_load(unsigned shared, const void* tensor_map, const int* coordinates,
                  unsigned address) {
  TileCopy copy = tile_copy(true, shared, tensor_map, coordinates);
  each_element(copy, [](char* to, char*, unsigned bytes) { memset(to, kPoison, bytes); });
  Mbarrier& barrier = mbarrier(address);
  if (barrier.unfenced) emu_fault("TMA: no fence.proxy.async after its mbarrier was initialised");
  barrier.loads.push_back(copy);
}

void emu_tma_store(unsigned shared, const void* tensor_map, const int* coordinates) {
  running_fiber()->stores.open.push_back(tile_copy(false, shared, tensor_map, coordinates));
}
void emu_tma_store_commit() { commit(running_fiber()->stores); }
void emu_tma_store_wait(unsigned groups_left) { wait(running_fiber()->stores, groups_left); }
}
