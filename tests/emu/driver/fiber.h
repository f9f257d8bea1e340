// Fibers: the CUDA threads of a block take turns on one OS thread. x86-64, System V ABI.
#pragma once
#include <ctime>

#include <cstddef>

#if !defined(__x86_64__)
#error "the emulated GPU switches stacks with x86-64 instructions"
#endif

// Saves the callee-saved registers on the current stack, its top in *save, and resumes `to`.
extern "C" void emu_switch_stack(void** save, void* to);

// A stack with an unmapped page below it. It lives as long as the process. The tops of 32 that follow
// each other are in different cache lines of any cache, for a warp's threads go on in turn.
class FiberStack {
 public:
  FiberStack();
  // The stack pointer of a fiber that, when resumed, calls `main` (which must not return).
  void* prepare(void (*main)());
  // Where a fiber that was stopped by a signal can go on.
  void* top() const { return top_; }

 private:
  static constexpr size_t kBytes = 256 * 1024, kStagger = 33 * 64;
  char* top_;
};

// While one lives, a bad memory access made by a fiber, or one that runs for too long, ends that
// fiber with `emu_fault` instead of ending the process. Anything else goes to the handlers that were
// there.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();
  // The time a block may take begins: XPUC_EMU_BLOCK_SECONDS (20) of the processor's.
  void start_block();

 private:
  timer_t timer_;
};
