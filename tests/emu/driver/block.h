// One block of a launch: its threads as fibers, its warps, its shared memory.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.h"
#include "kernel_abi.h"
#include "shared_memory.h"

enum class State { kReady, kAtBlockBarrier, kAtNamedBarrier, kAtCollective, kAtMbarrier, kDone };

struct Copy {  // an asynchronous copy that was issued and is not complete
  char* to;
  const char* from;
  unsigned bytes, source_bytes;  // the rest is filled with zeros
};

struct TileCopy {  // a TMA copy between global and shared memory
  bool load;
  unsigned shared;
  EmuTensorMap map;
  int at[5];
};

// Issued copies in groups: `commit` closes the open one, `wait` completes the oldest.
template <class T>
struct CopyGroups {
  std::vector<T> open;
  std::vector<std::vector<T>> committed;
};

// Sums of wgmma that were not waited for: the registers are poison and hold these then.
struct Products {
  struct Sum {
    uint32_t* at;  // its register
    uint32_t bits;
    unsigned group;  // how many groups were committed before
  };
  // Whether the register's is hidden[place]; where not, it would be in front of that one.
  bool find(uint32_t* at);

  std::vector<Sum> hidden;  // by register
  size_t place;
  unsigned committed;
  bool fenced;  // a wgmma.fence, and no wait since then
};

struct Fiber : EmuThread {
  FiberStack* stack;
  void* stack_pointer;
  State state;
  unsigned warp;
  unsigned barrier_line;  // of the __syncthreads it waits at
  unsigned barrier_id;    // of the named barrier, or the address of the mbarrier, it waits at
  unsigned mask;          // of the collective it waits at
  const char* collective;
  EmuCollective run;
  void* operand;
  CopyGroups<Copy> copies;
  CopyGroups<TileCopy> stores;
  Products products;
};

struct Mbarrier {
  unsigned count, pending;  // arrivals
  int64_t bytes;            // expected and not yet copied
  bool phase;
  std::vector<TileCopy> loads;  // issued against it; complete when it is waited for
  const Fiber* unfenced;        // who initialised it, until it fences that for TMA
};

enum class Order { kForward, kReverse, kShuffle };  // of threads and of blocks

class Block {
 public:
  // Runs all blocks of a launch. Empty, or what went wrong.
  std::string run_grid(const EmuKernel& kernel, void** arguments, EmuDim grid, EmuDim block,
                       unsigned dynamic_bytes);

  // Called by the running fiber.
  void block_barrier(unsigned line);
  void named_barrier(unsigned id, unsigned n_threads, bool wait);
  void collective(unsigned mask, const char* name, EmuCollective run, void* operand);
  void wait_for_mbarrier(unsigned address);
  void release_mbarrier(unsigned address);
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void finish_thread();
  unsigned live_lanes() const;

  SharedMemory shared;
  std::unordered_map<unsigned, Mbarrier> mbarriers;  // by shared address
  const EmuKernel* kernel;
  void** arguments;

 private:
  struct Warp {
    unsigned first, n_lanes;
    unsigned live, at_collective;  // masks of lanes
  };
  struct NamedBarrier {
    unsigned arrived = 0, n_threads = 0;
  };

  void start(EmuDim grid, EmuDim block, EmuDim index, unsigned dynamic_bytes);
  void run();
  bool run_warp(Warp& warp);
  Fiber* next_ready();
  void suspend(State state);
  void release(State state, unsigned barrier_id);
  void release_block_barrier();
  bool release_collective(Warp& warp, unsigned mask);
  void release_warp(Warp& warp);
  void deadlock();
  void order(unsigned n, std::vector<unsigned>& into);

  std::vector<FiberStack> stacks_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  NamedBarrier named_[16];
  unsigned live_, at_barrier_;
  Order order_;
  uint32_t random_;  // the state of a shuffle's generator
  std::vector<unsigned> blocks_turns_, warps_turns_;
  std::vector<unsigned> turns_;  // of the running warp: its lanes as they go on
  size_t turn_;                  // whose comes next
  Warp* warp_;                   // the running one
  void* scheduler_;              // its stack pointer while a fiber runs
  std::string error_;
};

Block& running_block();
Fiber* running_fiber();
