// Math and bit intrinsics. The fast ones are as exact as the host's: a tolerance must cover the
// hardware's 2-ulp ones.
#pragma once

#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }

template <class To, class From>
inline To emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same size");
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline int __mulhi(int a, int b) { return int64_t(a) * b >> 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return ((uint64_t(high) << 32) | low) >> (shift & 31);
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = (uint64_t(b) << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned which = selector >> (4 * i) & 0xf;
    unsigned byte = bytes >> (8 * (which & 7)) & 0xff;
    if (which & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

template <class A, class B>  // not inlined, as kernels have many
[[gnu::noinline]] int emu_dot4(unsigned a, unsigned b, int c) {
  for (int shift = 0; shift < 32; shift += 8) c += int(A(a >> shift)) * int(B(b >> shift));
  return c;
}
inline int __dp4a(int a, int b, int c) { return emu_dot4<int8_t, int8_t>(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return emu_dot4<uint8_t, uint8_t>(a, b, c);
}

// A byte or a half-word at a time.
template <class Lane, class Combine>
inline unsigned emu_simd(unsigned a, unsigned b, Combine combine) {
  unsigned result = 0;
  constexpr int bits = 8 * sizeof(Lane);
  for (int shift = 0; shift < 32; shift += bits) {
    auto lane = std::make_unsigned_t<Lane>(combine(Lane(a >> shift), Lane(b >> shift)));
    result |= unsigned(lane) << shift;
  }
  return result;
}
inline unsigned __vadd4(unsigned a, unsigned b) {
  return emu_simd<int8_t>(a, b, [](int x, int y) { return x + y; });
}
inline unsigned __vsub4(unsigned a, unsigned b) {
  return emu_simd<int8_t>(a, b, [](int x, int y) { return x - y; });
}
inline unsigned __vsubss4(unsigned a, unsigned b) {
  return emu_simd<int8_t>(a, b, [](int x, int y) {
    return x - y < -128 ? -128 : x - y > 127 ? 127 : x - y;
  });
}

template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline void __stcs(T* address, T value) {
  *address = value;
}

template <class A, class B>
inline auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) > T(b) ? T(a) : T(b);
}
template <class A, class B>
inline auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(a) : T(b);
}
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }

inline size_t __cvta_generic_to_global(const void* pointer) { return size_t(pointer); }
inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return unsigned(static_cast<const char*>(pointer) - emu_thread->shared) + kSharedBase;
}
