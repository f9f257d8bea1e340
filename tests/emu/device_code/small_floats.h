// half and bfloat16: 16 bits, computed in f32 and rounded to nearest even after each operation
// (for + - * / that gives what the hardware's own instruction gives).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// immintrin.h would be most of what is precompiled.
typedef float EmuFloats __attribute__((vector_size(16)));
typedef short EmuHalves __attribute__((vector_size(16)));

struct EmuHalfCodec {
  static uint16_t encode(float x) { return __builtin_ia32_vcvtps2ph(EmuFloats{x}, 0)[0]; }
  static float decode(uint16_t bits) { return __builtin_ia32_vcvtph2ps(EmuHalves{short(bits)})[0]; }
};

struct EmuBfloatCodec {
  static uint16_t encode(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the NaN CUDA makes
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static float decode(uint16_t half) {
    uint32_t bits = uint32_t(half) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
};

template <class Codec>
struct EmuSmallFloat {
  uint16_t bits;

  EmuSmallFloat() = default;
  EmuSmallFloat(float x) : bits(Codec::encode(x)) {}
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  EmuSmallFloat(T x) : bits(Codec::encode(float(x))) {}
  operator float() const { return Codec::decode(bits); }

  EmuSmallFloat operator-() const {
    EmuSmallFloat result;
    result.bits = bits ^ 0x8000;
    return result;
  }
  friend EmuSmallFloat operator+(EmuSmallFloat a, EmuSmallFloat b) { return float(a) + float(b); }
  friend EmuSmallFloat operator-(EmuSmallFloat a, EmuSmallFloat b) { return float(a) - float(b); }
  friend EmuSmallFloat operator*(EmuSmallFloat a, EmuSmallFloat b) { return float(a) * float(b); }
  friend EmuSmallFloat operator/(EmuSmallFloat a, EmuSmallFloat b) { return float(a) / float(b); }
  EmuSmallFloat& operator+=(EmuSmallFloat b) { return *this = *this + b; }
  EmuSmallFloat& operator-=(EmuSmallFloat b) { return *this = *this - b; }
  EmuSmallFloat& operator*=(EmuSmallFloat b) { return *this = *this * b; }
  EmuSmallFloat& operator/=(EmuSmallFloat b) { return *this = *this / b; }
};

using half = EmuSmallFloat<EmuHalfCodec>;
using __half = half;
using __nv_bfloat16 = EmuSmallFloat<EmuBfloatCodec>;
using nv_bfloat16 = __nv_bfloat16;

template <class Codec>
struct alignas(4) EmuSmallFloat2 {
  EmuSmallFloat<Codec> x, y;

  EmuSmallFloat2() = default;
  EmuSmallFloat2(EmuSmallFloat<Codec> x, EmuSmallFloat<Codec> y) : x(x), y(y) {}
};
using half2 = EmuSmallFloat2<EmuHalfCodec>;
using __half2 = half2;
using __nv_bfloat162 = EmuSmallFloat2<EmuBfloatCodec>;
using nv_bfloat162 = __nv_bfloat162;
