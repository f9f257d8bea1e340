// Device and pinned host memory: poisoned when allocated, between pages and bytes nobody may touch.
#pragma once
#include <cstddef>
#include <string>

constexpr unsigned char kPoison = 0xFF;  // NaN in every float format, -1 in every int

// Memory with 16 MiB on both sides that are not mapped. `bytes` is a multiple of the page.
char* map_between_guard_pages(size_t bytes);

bool is_poison(const char* begin, size_t bytes);

// nullptr for 0 bytes or where there is no memory.
void* allocate_device(size_t bytes);
void* allocate_pinned(size_t bytes);
// False if it was not allocated so, or is freed already.
bool free_device(void* pointer);
bool free_pinned(void* pointer);

bool is_device(const void* pointer, size_t bytes);  // wholly inside one live allocation
bool is_pinned(const void* pointer);
size_t device_bytes();  // live

// Empty, or which allocation was written outside its bounds: by a few bytes, where no page guards.
std::string device_overrun();
// An address in words: where it lies relative to the nearest allocation.
std::string describe_address(const void* pointer);
