// float2, uint4, ... with CUDA's alignment.
#pragma once

#define EMU_VECTORS(Scalar, Name)                                                              \
  struct Name##1 {                                                                             \
    Scalar x;                                                                                  \
  };                                                                                           \
  struct alignas(2 * sizeof(Scalar)) Name##2 {                                                 \
    Scalar x, y;                                                                               \
  };                                                                                           \
  struct Name##3 {                                                                             \
    Scalar x, y, z;                                                                            \
  };                                                                                           \
  struct alignas(sizeof(Scalar) < 4 ? 4 * sizeof(Scalar) : 16) Name##4 {                       \
    Scalar x, y, z, w;                                                                         \
  };                                                                                           \
  inline Name##1 make_##Name##1(Scalar x) { return {x}; }                                      \
  inline Name##2 make_##Name##2(Scalar x, Scalar y) { return {x, y}; }                         \
  inline Name##3 make_##Name##3(Scalar x, Scalar y, Scalar z) { return {x, y, z}; }            \
  inline Name##4 make_##Name##4(Scalar x, Scalar y, Scalar z, Scalar w) { return {x, y, z, w}; }

EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
#undef EMU_VECTORS

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
