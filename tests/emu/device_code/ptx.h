// What the translation of inline PTX (ptx.py) calls, beside the driver's emu_ functions.
#pragma once

// Assigns a register: the bits, where the sizes agree, as `mov.b32` does between an int and a float.
template <class To, class From>
inline void emu_set(To& to, From from) {
  if constexpr (sizeof(To) == sizeof(From)) {
    memcpy(static_cast<void*>(&to), &from, sizeof to);
  } else {
    to = To(from);
  }
}

// An address operand: shared memory's are 32-bit offsets, the others pointers.
inline void* emu_shared_address(unsigned address) { return emu_shared_pointer(address); }
inline void* emu_global_address(const void* address) { return const_cast<void*>(address); }
inline void* emu_global_address(uint64_t address) { return reinterpret_cast<void*>(address); }

inline unsigned emu_offset(unsigned address, int bytes) { return address + bytes; }
inline uint64_t emu_offset(uint64_t address, int bytes) { return address + bytes; }
inline const void* emu_offset(const void* address, int bytes) {
  return static_cast<const char*>(address) + bytes;
}

// Element i of a vector access of n elements, which must be aligned to all of it.
template <class T>
inline T* emu_element(void* address, unsigned i, unsigned n) {
  if (reinterpret_cast<uintptr_t>(address) % (n * sizeof(T))) {
    emu_fault("misaligned address: an access of %u bytes", unsigned(n * sizeof(T)));
  }
  return static_cast<T*>(address) + i;
}

// What .ftz makes of a result.
inline float emu_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }

inline unsigned emu_lop3(unsigned a, unsigned b, unsigned c, unsigned table) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) {
    unsigned row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
    result |= (table >> row & 1) << i;
  }
  return result;
}

inline half2 emu_half2(unsigned bits) { return emu_bits<half2>(bits); }
