// Barriers, shuffles and votes.
#pragma once

#define __syncthreads() emu_block_barrier(__LINE__)
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emu_collective(mask, "__syncwarp", nullptr, nullptr);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline unsigned __activemask() { return emu_live_lanes(); }
inline long long clock64() { return 0; }

template <class T>
struct EmuShuffle {
  T value, result;
  int source;  // lane; outside the warp: the lane's own value
};

// A lane that reads one that takes no part gets poison: undefined on the hardware.
template <class T>
inline void emu_exchange(void* const operands[32], unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* to = static_cast<EmuShuffle<T>*>(operands[lane]);
    auto* from = static_cast<EmuShuffle<T>*>(operands[to->source]);
    if (from) {
      memcpy(&to->result, &from->value, sizeof(T));
    } else {
      memset(static_cast<void*>(&to->result), 0xff, sizeof(T));
    }
  }
}

template <class T>
inline T emu_shuffle(unsigned mask, const char* name, T value, int source, bool inside) {
  EmuShuffle<T> operand{value, value, inside ? source : int(emu_thread->lane)};
  emu_collective(mask, name, emu_exchange<T>, &operand);
  return operand.result;
}

// Not inlined: a kernel that is compiled has more of them than of anything else.
template <class T>
[[gnu::noinline]] T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  int base = emu_thread->lane & ~(width - 1);
  return emu_shuffle(mask, "__shfl_sync", value, base + (lane & (width - 1)), true);
}
template <class T>
[[gnu::noinline]] T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = emu_thread->lane, source = lane - int(delta);
  return emu_shuffle(mask, "__shfl_up_sync", value, source, source >= (lane & ~(width - 1)));
}
template <class T>
[[gnu::noinline]] T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = emu_thread->lane, source = lane + int(delta);
  bool inside = source < (lane & ~(width - 1)) + width;
  return emu_shuffle(mask, "__shfl_down_sync", value, source, inside);
}
template <class T>
[[gnu::noinline]] T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  int lane = emu_thread->lane, source = lane ^ lanes;
  bool inside = source < (lane & ~(width - 1)) + width;
  return emu_shuffle(mask, "__shfl_xor_sync", value, source, inside);
}

struct EmuVote {
  unsigned vote, result;  // vote: the value; result: of the reduction
};

template <class Combine>
inline void emu_combine(void* const operands[32], unsigned mask, unsigned start, Combine combine) {
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) start = combine(start, static_cast<EmuVote*>(operands[lane])->vote, lane);
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<EmuVote*>(operands[lane])->result = start;
  }
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  EmuVote operand{predicate != 0, 0};
  emu_collective(
      mask, "__ballot_sync",
      [](void* const operands[32], unsigned mask) {
        emu_combine(operands, mask, 0,
                    [](unsigned all, unsigned vote, int lane) { return all | vote << lane; });
      },
      &operand);
  return operand.result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

#define EMU_REDUCE(Name, Type, Start, Expression)                                        \
  inline Type Name(unsigned mask, Type value) {                                          \
    EmuVote operand{unsigned(value), 0};                                                 \
    emu_collective(                                                                      \
        mask, #Name,                                                                     \
        [](void* const operands[32], unsigned mask) {                                    \
          emu_combine(operands, mask, unsigned(Start), [](unsigned x, unsigned y, int) { \
            Type a = Type(x), b = Type(y);                                               \
            return unsigned(Expression);                                                 \
          });                                                                            \
        },                                                                               \
        &operand);                                                                       \
    return Type(operand.result);                                                         \
  }
EMU_REDUCE(__reduce_add_sync, unsigned, 0, a + b)
EMU_REDUCE(__reduce_add_sync, int, 0, unsigned(a) + unsigned(b))
EMU_REDUCE(__reduce_min_sync, unsigned, 0xffffffffu, a < b ? a : b)
EMU_REDUCE(__reduce_min_sync, int, 0x7fffffff, a < b ? a : b)
EMU_REDUCE(__reduce_max_sync, unsigned, 0, a > b ? a : b)
EMU_REDUCE(__reduce_max_sync, int, 0x80000000u, a > b ? a : b)
EMU_REDUCE(__reduce_or_sync, unsigned, 0, a | b)
EMU_REDUCE(__reduce_and_sync, unsigned, 0xffffffffu, a & b)
#undef EMU_REDUCE

// Whether this lane is the one elect.sync chooses: the lowest.
inline bool emu_elect(unsigned mask) {
  return (__ballot_sync(mask, 1) & ((1u << emu_thread->lane) - 1)) == 0;
}
