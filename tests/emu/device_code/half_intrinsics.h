// The functions of cuda_fp16.h and cuda_bf16.h.
#pragma once

inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }
inline half __float2half_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline half __int2half_rn(int x) { return half(float(x)); }
inline unsigned short __half_as_ushort(half x) { return x.bits; }
inline half __ushort_as_half(unsigned short x) { return emu_bits<half>(x); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return emu_bits<__nv_bfloat16>(x); }

template <class C>
inline bool __hgt(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return float(a) > float(b);
}
template <class C>
inline bool __hlt(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return float(a) < float(b);
}
template <class C>
inline EmuSmallFloat<C> __hadd(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return a + b;
}
template <class C>
inline EmuSmallFloat<C> __hsub(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return a - b;
}
template <class C>
inline EmuSmallFloat<C> __hmul(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return a * b;
}
template <class C>
inline EmuSmallFloat<C> __hmax(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return fmaxf(a, b);
}
template <class C>
inline EmuSmallFloat<C> __hmin(EmuSmallFloat<C> a, EmuSmallFloat<C> b) {
  return fminf(a, b);
}
template <class C>  // the product is exact in f64, and so, but for far exponents, is the sum
inline EmuSmallFloat<C> __hfma(EmuSmallFloat<C> a, EmuSmallFloat<C> b, EmuSmallFloat<C> c) {
  return float(double(float(a)) * double(float(b)) + double(float(c)));
}
template <class C>
inline EmuSmallFloat<C> __habs(EmuSmallFloat<C> x) {
  x.bits &= 0x7fff;
  return x;
}

#define EMU_UNARY(Name, Function)                    \
  template <class C>                                 \
  inline EmuSmallFloat<C> Name(EmuSmallFloat<C> x) { \
    return Function(float(x));                       \
  }
EMU_UNARY(hexp, expf)
EMU_UNARY(hexp2, exp2f)
EMU_UNARY(hlog, logf)
EMU_UNARY(hlog2, log2f)
EMU_UNARY(hsqrt, sqrtf)
EMU_UNARY(hrsqrt, rsqrtf)
EMU_UNARY(hsin, sinf)
EMU_UNARY(hcos, cosf)
EMU_UNARY(htanh, tanhf)
EMU_UNARY(hrint, rintf)
EMU_UNARY(hfloor, floorf)
EMU_UNARY(hceil, ceilf)
EMU_UNARY(htrunc, truncf)
#undef EMU_UNARY

// ---- pairs

template <class C>
inline EmuSmallFloat2<C> operator+(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b) {
  return {a.x + b.x, a.y + b.y};
}
template <class C>
inline EmuSmallFloat2<C> operator-(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b) {
  return {a.x - b.x, a.y - b.y};
}
template <class C>
inline EmuSmallFloat2<C> operator*(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b) {
  return {a.x * b.x, a.y * b.y};
}
template <class C>
inline EmuSmallFloat2<C> __hadd2(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b) {
  return a + b;
}
template <class C>
inline EmuSmallFloat2<C> __hsub2(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b) {
  return a - b;
}
template <class C>
inline EmuSmallFloat2<C> __hmul2(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b) {
  return a * b;
}
template <class C>
inline EmuSmallFloat2<C> __hfma2(EmuSmallFloat2<C> a, EmuSmallFloat2<C> b, EmuSmallFloat2<C> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

inline half2 make_half2(half x, half y) { return {x, y}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline half2 __half2half2(half x) { return {x, x}; }
inline half2 __float2half2_rn(float x) { return {x, x}; }
inline half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline half __low2half(half2 x) { return x.x; }
inline half __high2half(half2 x) { return x.y; }
inline float __low2float(half2 x) { return x.x; }
inline float __high2float(half2 x) { return x.y; }
inline float2 __half22float2(half2 x) { return {float(x.x), float(x.y)}; }
inline half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
