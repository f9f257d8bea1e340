#include "block.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

EmuThread* emu_thread = nullptr;

namespace {
Block the_block;  // blocks run in turn: one is enough

void fiber_main() {
  the_block.kernel->entry(the_block.arguments);
  the_block.finish_thread();
}

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}
Order order_asked_for() {
  const char* name = getenv("XPUC_EMU_ORDER");
  if (name && !strcmp(name, "reverse")) return Order::kReverse;
  if (name && !strcmp(name, "shuffle")) return Order::kShuffle;
  return Order::kForward;
}
}  // namespace

Block& running_block() { return the_block; }
Fiber* running_fiber() { return static_cast<Fiber*>(emu_thread); }

std::string Block::run_grid(const EmuKernel& kernel, void** arguments, EmuDim grid, EmuDim block,
                            unsigned dynamic_bytes) {
  this->kernel = &kernel;
  this->arguments = arguments;
  error_.clear();
  order_ = order_asked_for();
  random_ = 12345;
  FaultHandlers handlers;
  order(grid.x * grid.y * grid.z, blocks_turns_);
  for (unsigned i : blocks_turns_) {
    handlers.start_block();
    start(grid, block, {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)}, dynamic_bytes);
    run();
    if (error_.empty()) error_ = shared.overrun();
    if (!error_.empty()) break;
  }
  return error_;
}

void Block::start(EmuDim grid, EmuDim block, EmuDim index, unsigned dynamic_bytes) {
  unsigned n = block.x * block.y * block.z;
  stacks_.resize(std::max<size_t>(stacks_.size(), n));
  fibers_.resize(n);
  warps_.assign((n + 31) / 32, Warp{});
  std::fill_n(named_, 16, NamedBarrier{});
  mbarriers.clear();
  shared.reset(dynamic_bytes);
  live_ = n;
  at_barrier_ = 0;
  for (unsigned i = 0; i < n; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.thread = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    fiber.block = index;
    fiber.block_dim = block;
    fiber.grid_dim = grid;
    fiber.lane = i % 32;
    fiber.linear = i;
    fiber.shared = shared.base();
    fiber.stack = &stacks_[i];
    fiber.stack_pointer = stacks_[i].prepare(fiber_main);
    fiber.state = State::kReady;
    fiber.warp = i / 32;
    fiber.copies = {};
    fiber.stores = {};
    fiber.products = {};
  }
  for (unsigned w = 0; w < warps_.size(); ++w) {
    unsigned lanes = std::min(32u, n - 32 * w);
    warps_[w] = {32 * w, lanes, lanes == 32 ? ~0u : (1u << lanes) - 1, 0};
  }
}

// 0 .. n-1 in the order asked for; a shuffle is the same in every run.
void Block::order(unsigned n, std::vector<unsigned>& into) {
  into.resize(n);
  std::iota(into.begin(), into.end(), 0u);
  if (order_ == Order::kReverse) std::reverse(into.begin(), into.end());
  if (order_ == Order::kShuffle) {
    for (unsigned i = n; i > 1; --i) {
      random_ = random_ * 1664525u + 1013904223u;
      std::swap(into[i - 1], into[(random_ >> 8) % i]);
    }
  }
}

void Block::run() {
  while (live_ > 0 && error_.empty()) {
    bool progress = false;
    order(warps_.size(), warps_turns_);
    for (unsigned w : warps_turns_) progress |= run_warp(warps_[w]);
    if (!progress && error_.empty()) deadlock();
  }
}

// Runs the warp's threads, each in its turn until it waits, until all wait. Whether any ran.
bool Block::run_warp(Warp& warp) {
  warp_ = &warp;
  bool progress = false;
  for (;;) {
    order(warp.n_lanes, turns_);
    turn_ = 0;
    Fiber* fiber = next_ready();
    if (!fiber) return progress;
    progress = true;
    emu_thread = fiber;
    emu_switch_stack(&scheduler_, fiber->stack_pointer);
    emu_thread = nullptr;
  }
}

// Of the threads whose turn is still to come the first that can go on. Null if there is none, or if
// something went wrong.
Fiber* Block::next_ready() {
  if (!error_.empty()) return nullptr;
  while (turn_ < turns_.size()) {
    Fiber& fiber = fibers_[warp_->first + turns_[turn_++]];
    if (fiber.state == State::kReady) return &fiber;
  }
  return nullptr;
}

// Stops the running thread, and lets the next one go on.
void Block::suspend(State state) {
  Fiber* fiber = running_fiber();
  fiber->state = state;
  Fiber* next = next_ready();
  if (next) emu_thread = next;
  emu_switch_stack(&fiber->stack_pointer, next ? next->stack_pointer : scheduler_);
}

void Block::finish_thread() {
  Fiber* fiber = running_fiber();
  if (!fiber->stores.open.empty() || !fiber->stores.committed.empty()) {
    fail("the thread ended before its cp.async.bulk stores were waited for");
  }
  if (!fiber->products.hidden.empty()) {
    fail("the thread ended before its wgmma were waited for");
  }
  Warp& warp = warps_[fiber->warp];
  warp.live &= ~(1u << fiber->lane);
  --live_;
  if (live_ > 0 && at_barrier_ == live_) release_block_barrier();
  release_warp(warp);
  suspend(State::kDone);
  abort();
}

void Block::fail(const std::string& what) {
  Fiber* fiber = running_fiber();
  const EmuDim &b = fiber->block, &t = fiber->thread;
  error_ = format("%s, in block (%u, %u, %u), thread (%u, %u, %u)", what.c_str(), b.x, b.y, b.z,
                  t.x, t.y, t.z);
  suspend(State::kDone);
  abort();
}

void Block::deadlock() {
  unsigned waiting[6] = {};
  const char* collective = "";
  for (const Fiber& fiber : fibers_) {
    ++waiting[static_cast<int>(fiber.state)];
    if (fiber.state == State::kAtCollective) collective = fiber.collective;
  }
  const EmuDim& b = fibers_[0].block;
  error_ = format(
      "divergent barrier: of %u threads %u wait at __syncthreads, %u at a named barrier, %u at a "
      "warp operation (%s), %u for an mbarrier, %u have ended, in block (%u, %u, %u)",
      unsigned(fibers_.size()), waiting[1], waiting[2], waiting[3], collective, waiting[4],
      waiting[5], b.x, b.y, b.z);
}

// ---- what threads wait at

void Block::block_barrier(unsigned line) {
  running_fiber()->barrier_line = line;
  ++at_barrier_;
  if (at_barrier_ < live_) return suspend(State::kAtBlockBarrier);
  running_fiber()->state = State::kAtBlockBarrier;
  release_block_barrier();
}

// PTX lets a thread that has ended count as arrived; one that waits at another barrier does not.
void Block::release_block_barrier() {
  unsigned line = 0;
  for (Fiber& fiber : fibers_) {
    if (fiber.state != State::kAtBlockBarrier) continue;
    if (line && fiber.barrier_line != line) {
      fail(format("divergent barrier: the block's threads wait at the __syncthreads of lines %u "
                  "and %u", line, fiber.barrier_line));
    }
    line = fiber.barrier_line;
    fiber.state = State::kReady;
  }
  at_barrier_ = 0;
}

void Block::named_barrier(unsigned id, unsigned n_threads, bool wait) {
  if (id > 15) fail(format("named barrier %u: there are 16", id));
  if (n_threads == 0 || n_threads % 32 || n_threads > fibers_.size()) {
    fail(format("named barrier of %u threads in a block of %u: it takes whole warps", n_threads,
                unsigned(fibers_.size())));
  }
  NamedBarrier& barrier = named_[id];
  if (barrier.arrived && barrier.n_threads != n_threads) {
    fail(format("named barrier %u: for %u threads here, for %u elsewhere", id, n_threads,
                barrier.n_threads));
  }
  barrier.n_threads = n_threads;
  running_fiber()->barrier_id = id;
  if (++barrier.arrived < n_threads) {
    if (wait) suspend(State::kAtNamedBarrier);
    return;
  }
  release(State::kAtNamedBarrier, id);
  barrier = {};
}

void Block::collective(unsigned mask, const char* name, EmuCollective run, void* operand) {
  Fiber* fiber = running_fiber();
  if (!(mask >> fiber->lane & 1)) fail(format("%s: lane %u is not in its mask", name, fiber->lane));
  fiber->mask = mask;
  fiber->collective = name;
  fiber->run = run;
  fiber->operand = operand;
  fiber->state = State::kAtCollective;
  warps_[fiber->warp].at_collective |= 1u << fiber->lane;
  if (!release_collective(warps_[fiber->warp], mask)) suspend(State::kAtCollective);
}

// Runs the operation of `mask` if all its live lanes have come, and lets them go on.
bool Block::release_collective(Warp& warp, unsigned mask) {
  unsigned members = mask & warp.live;
  if ((warp.at_collective & members) != members) return false;
  void* operands[32] = {};
  const Fiber* first = nullptr;
  for (unsigned lanes = members; lanes; lanes &= lanes - 1) {
    unsigned lane = __builtin_ctz(lanes);
    const Fiber& fiber = fibers_[warp.first + lane];
    if (fiber.mask != mask) return false;
    if (!first) first = &fiber;
    if (fiber.collective != first->collective && strcmp(fiber.collective, first->collective)) {
      fail(format("divergent warp: lanes of one mask are at %s and at %s", first->collective,
                  fiber.collective));
    }
    operands[lane] = fiber.operand;
  }
  if (first->run) first->run(operands, members);
  warp.at_collective &= ~members;
  for (unsigned lanes = members; lanes; lanes &= lanes - 1) {
    fibers_[warp.first + __builtin_ctz(lanes)].state = State::kReady;
  }
  return true;
}

// A lane has ended: what waited for it alone goes on.
void Block::release_warp(Warp& warp) {
  for (unsigned lanes = warp.at_collective; lanes; lanes &= lanes - 1) {
    unsigned lane = __builtin_ctz(lanes);
    if (!(warp.at_collective >> lane & 1)) continue;  // an earlier one took it along
    release_collective(warp, fibers_[warp.first + lane].mask);
  }
}

void Block::wait_for_mbarrier(unsigned address) {
  running_fiber()->barrier_id = address;
  suspend(State::kAtMbarrier);
}

void Block::release_mbarrier(unsigned address) { release(State::kAtMbarrier, address); }

void Block::release(State state, unsigned barrier_id) {
  for (Fiber& fiber : fibers_) {
    if (fiber.state == state && fiber.barrier_id == barrier_id) fiber.state = State::kReady;
  }
}

unsigned Block::live_lanes() const { return warps_[running_fiber()->warp].live; }

extern "C" {
void emu_fault(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  the_block.fail(buffer);
}
void emu_block_barrier(unsigned line) { the_block.block_barrier(line); }
void emu_named_barrier(unsigned id, unsigned n_threads, bool wait) {
  the_block.named_barrier(id, n_threads, wait);
}
void emu_collective(unsigned mask, const char* name, EmuCollective run, void* operand) {
  the_block.collective(mask, name, run, operand);
}
unsigned emu_live_lanes() { return the_block.live_lanes(); }
void* emu_shared_array(const void* key, size_t bytes) { return the_block.shared.array(key, bytes); }
void* emu_shared_pointer(unsigned address) { return the_block.shared.pointer(address); }
}
