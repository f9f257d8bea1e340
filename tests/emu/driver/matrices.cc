// ldmatrix, mma.sync and wgmma: fragment layouts as in the PTX ISA's figures. A float result is
// summed in order of k, in f32 (the hardware's order and rounding are its own).
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "../device_code/small_floats.h"
#include "block.h"

namespace {

constexpr unsigned kWarp = ~0u;

struct F16 {
  using Stored = half;
  using Sum = float;
};
struct BF16 {
  using Stored = __nv_bfloat16;
  using Sum = float;
};
struct S8 {
  using Stored = int8_t;
  using Sum = uint32_t;  // wraps
};
struct U8 {
  using Stored = uint8_t;
  using Sum = uint32_t;
};

float widen(half x) { return float(x); }
float widen(__nv_bfloat16 x) { return float(x); }
uint32_t widen(int8_t x) { return uint32_t(int32_t(x)); }
uint32_t widen(uint8_t x) { return x; }

// 16 bytes, widened.
template <class Stored, class Sum>
void widen_all(const char* bytes, Sum* values) {
  Stored stored[16 / sizeof(Stored)];
  memcpy(stored, bytes, 16);
  for (unsigned i = 0; i < std::size(stored); ++i) values[i] = widen(stored[i]);
}
template <>
void widen_all<half>(const char* bytes, float* values) {
  _mm256_storeu_ps(values, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
}

// ---- ldmatrix

struct Ldmatrix {
  unsigned count;
  bool transposed;
  const char* row;  // lane 8m+r: row r of matrix m
  uint32_t* out;
};

void ldmatrix(void* const operands[32], unsigned) {
  const Ldmatrix* lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = static_cast<const Ldmatrix*>(operands[i]);
  for (int lane = 0; lane < 32; ++lane) {
    for (unsigned m = 0; m < lanes[lane]->count; ++m) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        int row = lane / 4, column = 2 * (lane % 4) + e;
        if (lanes[lane]->transposed) std::swap(row, column);
        memcpy(&pair[e], lanes[8 * m + row]->row + 2 * column, 2);
      }
      memcpy(&lanes[lane]->out[m], pair, 4);
    }
  }
}

// ---- mma.sync.m16n8, row.col. With g = lane / 4, t = lane % 4 and P elements in a register:
// A's register i + 2j holds row g + 8i, columns 4Pj + Pt ...; B's register j the same rows of k of
// column g; C's register e + 2i row g + 8i, column 2t + e.

template <class Sum>
struct Mma {
  unsigned k;
  Sum* c;
  const uint32_t *a, *b;
};

template <class Kind>
typename Kind::Sum unpacked(const uint32_t* registers, unsigned stride, unsigned at) {
  constexpr unsigned per = 4 / sizeof(typename Kind::Stored);
  typename Kind::Stored values[per];
  memcpy(values, &registers[at / (4 * per) * stride], 4);
  return widen(values[at % per]);
}

template <class Kind>
void mma(void* const operands[32], unsigned) {
  using Sum = typename Kind::Sum;
  constexpr unsigned per = 4 / sizeof(typename Kind::Stored);
  auto lane = [&](unsigned i) { return static_cast<const Mma<Sum>*>(operands[i]); };
  unsigned k_size = lane(0)->k;
  Sum a[16][32], b[8][32];
  for (unsigned row = 0; row < 16; ++row) {
    for (unsigned k = 0; k < k_size; ++k) {
      const uint32_t* registers = lane(row % 8 * 4 + k / per % 4)->a;
      a[row][k] = unpacked<Kind>(registers + row / 8, 2, k);
    }
  }
  for (unsigned column = 0; column < 8; ++column) {
    for (unsigned k = 0; k < k_size; ++k) {
      b[column][k] = unpacked<Kind>(lane(column * 4 + k / per % 4)->b, 1, k);
    }
  }
  for (unsigned row = 0; row < 16; ++row) {
    for (unsigned column = 0; column < 8; ++column) {
      Sum& c = lane(row % 8 * 4 + column / 2)->c[row / 8 * 2 + column % 2];
      for (unsigned k = 0; k < k_size; ++k) c += a[row][k] * b[column][k];
    }
  }
}

// ---- wgmma.m64, K-major; the first operand in registers, laid out in each warp as mma's, or both in
// shared memory. Warp w of four has rows 16w ...; within them a lane's register 4j + 2h + e is row
// g + 8h, column 8j + 2t + e.

template <class Sum>
struct Wgmma {
  unsigned n, warp;
  Sum* const* d;
  const uint32_t* a_registers;  // null: `a` describes it
  uint64_t a, b;
  bool accumulate;
  Sum sign_a, sign_b;
};

// The 32 bytes of a row of the matrix a descriptor names: two units, each whole in shared memory.
template <class Kind>
void described(uint64_t descriptor, unsigned row, typename Kind::Sum* values) {
  static constexpr unsigned kSwizzle[] = {0, 3, 2, 1};  // of the layout type: none, 128, 64, 32
  auto field = [&](int shift) { return unsigned(descriptor >> shift & 0x3fff) << 4; };
  unsigned start = field(0), leading = field(16), stride = field(32);
  unsigned swizzle = kSwizzle[descriptor >> 62];
  for (unsigned unit = 0; unit < 2; ++unit) {
    unsigned address;
    if (swizzle == 0) {  // core matrices of 8 rows of 16 bytes
      address = start + row / 8 * stride + unit * leading + row % 8 * 16;
    } else {
      address = start + row / 8 * stride + row % 8 * (16u << swizzle) + unit * 16;
      unsigned units = (1u << swizzle) - 1;
      address ^= (address >> 7 & units) << 4;
    }
    const char* last = static_cast<const char*>(emu_shared_pointer(address + 15));
    widen_all<typename Kind::Stored>(last - 15, values + unit * 16 / sizeof(typename Kind::Stored));
  }
}

// A register of one lane's, of A's rows 16w ... .
template <class Kind>
typename Kind::Sum held(void* const operands[32], unsigned row, unsigned k) {
  constexpr unsigned per = 4 / sizeof(typename Kind::Stored);
  void* lane = operands[row % 8 * 4 + k / per % 4];
  return unpacked<Kind>(static_cast<const Wgmma<typename Kind::Sum>*>(lane)->a_registers + row / 8,
                        2, k);
}

template <class Kind>
void wgmma(void* const operands[32], unsigned) {
  using Sum = typename Kind::Sum;
  constexpr unsigned k_size = 32 / sizeof(typename Kind::Stored);
  auto lane = [&](unsigned i) { return static_cast<const Wgmma<Sum>*>(operands[i]); };
  const Wgmma<Sum>& first = *lane(0);
  using Eight [[gnu::vector_size(8 * sizeof(Sum))]] = Sum;  // rows
  alignas(Eight) Sum a[k_size][16];
  auto eight = [](Sum* values) -> Eight& { return *reinterpret_cast<Eight*>(values); };
  for (unsigned row = 0; row < 16; ++row) {
    Sum values[k_size];
    if (first.a_registers) {
      for (unsigned k = 0; k < k_size; ++k) values[k] = held<Kind>(operands, row, k);
    } else {
      described<Kind>(first.a, 16 * first.warp + row, values);
    }
    for (unsigned k = 0; k < k_size; ++k) a[k][row] = first.sign_a * values[k];
  }
  for (unsigned column = 0; column < first.n; ++column) {
    auto d = [&](unsigned row) -> Sum& {
      return *lane(row % 8 * 4 + column % 8 / 2)->d[column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    alignas(Eight) Sum sums[16], values[k_size];
    for (unsigned row = 0; row < 16; ++row) sums[row] = first.accumulate ? d(row) : Sum(0);
    described<Kind>(first.b, column, values);
    Eight low = eight(sums), high = eight(sums + 8);
    for (unsigned k = 0; k < k_size; ++k) {
      Sum b = first.sign_b * values[k];
      low += eight(a[k]) * b;
      high += eight(a[k] + 8) * b;
    }
    eight(sums) = low, eight(sums + 8) = high;
    for (unsigned row = 0; row < 16; ++row) d(row) = sums[row];
  }
}

// One thread's part of a wgmma: what its registers hold is seen by wgmma at once, and by the thread
// when it has waited.
template <class Sum>
void start(Wgmma<Sum>& operand, EmuCollective run) {
  Products& products = running_fiber()->products;
  if (!products.fenced) emu_fault("wgmma: no wgmma.fence since the last wait");
  auto registers = [&](unsigned i) { return reinterpret_cast<uint32_t*>(operand.d[i]); };
  for (unsigned i = 0; i < operand.n / 2; ++i) {
    if (products.find(registers(i))) *registers(i) = products.hidden[products.place].bits;
  }
  emu_collective(kWarp, "wgmma", run, &operand);
  for (unsigned i = 0; i < operand.n / 2; ++i) {
    bool known = products.find(registers(i));
    auto sum = products.hidden.begin() + products.place;
    if (!known) sum = products.hidden.insert(sum, Products::Sum{});
    *sum = {registers(i), *registers(i), products.committed};
    memset(registers(i), 0xff, sizeof(uint32_t));
  }
}

}  // namespace

bool Products::find(uint32_t* at) {
  auto is = [&] { return place < hidden.size() && hidden[place].at == at; };
  if (++place, is()) return true;  // registers come in turn
  auto before = [](const Sum& sum, uint32_t* at) { return sum.at < at; };
  place = std::lower_bound(hidden.begin(), hidden.end(), at, before) - hidden.begin();
  return is();
}

extern "C" {

void emu_ldmatrix(unsigned count, bool transposed, unsigned address, uint32_t* out) {
  // Only the lanes whose rows are read need an address: 8 for each matrix.
  bool used = emu_thread->lane < 8 * count;
  if (used && address % 16) emu_fault("misaligned address: ldmatrix reads rows of 16 bytes");
  const void* row = used ? emu_shared_pointer(address) : nullptr;
  Ldmatrix operand{count, transposed, static_cast<const char*>(row), out};
  emu_collective(kWarp, "ldmatrix", ldmatrix, &operand);
}

void emu_mma_float(EmuElement element, unsigned k, float* c, const uint32_t* a, const uint32_t* b) {
  Mma<float> operand{k, c, a, b};
  emu_collective(kWarp, "mma.sync", element == EMU_F16 ? mma<F16> : mma<BF16>, &operand);
}

void emu_mma_int(EmuElement element, unsigned k, uint32_t* c, const uint32_t* a,
                 const uint32_t* b) {
  Mma<uint32_t> operand{k, c, a, b};
  emu_collective(kWarp, "mma.sync", element == EMU_S8 ? mma<S8> : mma<U8>, &operand);
}

void emu_wgmma_float(EmuElement element, unsigned n, float* const* d, const uint32_t* a_registers,
                     uint64_t a, uint64_t b, bool accumulate, int sign_a, int sign_b) {
  unsigned warp = emu_thread->linear / 32 % 4;
  Wgmma<float> operand{n, warp, d, a_registers, a, b, accumulate, float(sign_a), float(sign_b)};
  start(operand, element == EMU_F16 ? wgmma<F16> : wgmma<BF16>);
}

void emu_wgmma_int(EmuElement element, unsigned n, uint32_t* const* d, const uint32_t* a_registers,
                   uint64_t a, uint64_t b, bool accumulate) {
  unsigned warp = emu_thread->linear / 32 % 4;
  Wgmma<uint32_t> operand{n, warp, d, a_registers, a, b, accumulate, 1, 1};
  start(operand, element == EMU_S8 ? wgmma<S8> : wgmma<U8>);
}

void emu_wgmma_fence() { running_fiber()->products.fenced = true; }
void emu_wgmma_commit() { ++running_fiber()->products.committed; }

void emu_wgmma_wait(unsigned groups_left) {
  Products& products = running_fiber()->products;
  products.fenced = false;
  size_t kept = 0;
  for (const Products::Sum& sum : products.hidden) {
    if (sum.group + groups_left >= products.committed) {
      products.hidden[kept++] = sum;
    } else {
      *sum.at = sum.bits;
    }
  }
  products.hidden.resize(kept);
}
}
