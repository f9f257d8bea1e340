#include "memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = size_t(16) << 20;  // address space that stays unmapped on each side
constexpr size_t kAlignment = 256;  // cudaMalloc's
constexpr size_t kMargin = 256;     // of poison watched in front; behind, up to the page's end

struct Allocation {
  size_t bytes;
  char* mapped;
  size_t mapped_bytes;
};
using Allocations = std::map<const char*, Allocation>;
Allocations device, pinned;

size_t align(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// The allocation ends as near to the unmapped page as its alignment allows.
void* allocate(Allocations& into, size_t bytes) {
  if (bytes == 0 || bytes > (size_t(64) << 30)) return nullptr;
  size_t pages = align(align(bytes, kAlignment) + kMargin, kPage);
  char* mapped = map_between_guard_pages(pages);
  if (!mapped) return nullptr;
  memset(mapped, kPoison, pages);
  char* begin = mapped + pages - align(bytes, kAlignment);
  into[begin] = {bytes, mapped, pages};
  return begin;
}

bool release(Allocations& from, void* pointer) {
  auto found = from.find(static_cast<char*>(pointer));
  if (found == from.end()) return false;
  const Allocation& a = found->second;
  munmap(a.mapped - kGuard, a.mapped_bytes + 2 * kGuard);
  from.erase(found);
  return true;
}

// The allocation that begins at or before the address, or end().
Allocations::iterator before(Allocations& in, const void* pointer) {
  auto next = in.upper_bound(static_cast<const char*>(pointer));
  return next == in.begin() ? in.end() : std::prev(next);
}

}  // namespace

char* map_between_guard_pages(size_t bytes) {
  void* base = mmap(nullptr, bytes + 2 * kGuard, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(base) + kGuard;
  mprotect(begin, bytes, PROT_READ | PROT_WRITE);
  return begin;
}

bool is_poison(const char* begin, size_t bytes) {
  if (bytes == 0) return true;
  return static_cast<unsigned char>(*begin) == kPoison && !memcmp(begin, begin + 1, bytes - 1);
}

void* allocate_device(size_t bytes) { return allocate(device, bytes); }
void* allocate_pinned(size_t bytes) { return allocate(pinned, bytes); }
bool free_device(void* pointer) { return release(device, pointer); }
bool free_pinned(void* pointer) { return release(pinned, pointer); }

bool is_device(const void* pointer, size_t bytes) {
  auto found = before(device, pointer);
  if (found == device.end()) return false;
  const char* begin = static_cast<const char*>(pointer);
  return begin + bytes <= found->first + found->second.bytes;
}

bool is_pinned(const void* pointer) {
  auto found = before(pinned, pointer);
  return found != pinned.end() &&
         static_cast<const char*>(pointer) < found->first + found->second.bytes;
}

size_t device_bytes() {
  size_t total = 0;
  for (const auto& [begin, a] : device) total += a.bytes;
  return total;
}

std::string device_overrun() {
  for (const auto& [begin, a] : device) {
    const char *end = begin + a.bytes, *mapped_end = a.mapped + a.mapped_bytes;
    const char* side = !is_poison(begin - kMargin, kMargin)   ? "before the start"
                       : !is_poison(end, mapped_end - end) ? "past the end"
                                                              : nullptr;
    if (!side) continue;
    memset(const_cast<char*>(begin) - kMargin, kPoison, kMargin);
    memset(const_cast<char*>(end), kPoison, mapped_end - end);
    return std::string("device memory was written ") + side + " of an allocation of " +
           std::to_string(a.bytes) + " bytes";
  }
  return "";
}

std::string describe_address(const void* pointer) {
  char text[200];
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  auto found = before(device, pointer);
  if (found != device.end()) {
    size_t offset = address - reinterpret_cast<uintptr_t>(found->first);
    snprintf(text, sizeof text, "0x%zx, byte %zu of a device allocation of %zu bytes",
             size_t(address), offset, found->second.bytes);
    if (offset < found->second.bytes + (size_t(1) << 30)) return text;
  }
  snprintf(text, sizeof text, "0x%zx, which is no device memory", size_t(address));
  return text;
}
