#include "fiber.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

#include "block.h"
#include "memory.h"

asm(R"(
.text
.globl emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

FiberStack::FiberStack() {
  void* base = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    perror("emulated GPU: no memory for a thread's stack");
    abort();
  }
  mprotect(base, 4096, PROT_NONE);
  static unsigned n_stacks;
  top_ = static_cast<char*>(base) + kBytes - 64 - n_stacks++ % 32 * kStagger;
}

void* FiberStack::prepare(void (*main)()) {
  void** top = static_cast<void**>(this->top());
  *--top = nullptr;                          // main's return address: it has none
  *--top = reinterpret_cast<void*>(main);    // where emu_switch_stack returns to
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // the registers it pops
  return top;
}

namespace {

constexpr int kTimeout = SIGVTALRM;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, kTimeout};
constexpr size_t kAlternateBytes = 64 * 1024;
struct sigaction previous[std::size(kSignals)];
stack_t previous_stack;
int fault_signal;
const void* fault_address;

// Runs on the faulting fiber's stack, after the signal handler has returned.
[[noreturn]] void report() {
  if (fault_signal == SIGILL) {  // the trap of -fsanitize=alignment,bounds
    emu_fault("misaligned address, or an index past the end of an array of the thread");
  }
  if (fault_signal == SIGFPE) emu_fault("integer division by zero");
  if (fault_signal == kTimeout) {
    emu_fault("the block takes too long: an endless loop, or a wait for another block");
  }
  emu_fault("illegal access to %s", describe_address(fault_address).c_str());
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (emu_thread == nullptr && signal == kTimeout) return;  // the timer goes off again
  if (emu_thread == nullptr) {  // not a kernel's doing: let it happen again under the old handler
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous[i], nullptr);
    return;
  }
  fault_signal = signal;
  fault_address = info->si_addr;
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  registers[REG_RIP] = reinterpret_cast<greg_t>(report);
  registers[REG_RSP] = reinterpret_cast<greg_t>(running_fiber()->stack->top()) - 8;
}

}  // namespace

FaultHandlers::FaultHandlers() {
  static char* alternate = new char[kAlternateBytes];
  stack_t stack{};
  stack.ss_sp = alternate;
  stack.ss_size = kAlternateBytes;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &previous[i]);
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kTimeout;
  event._sigev_un._tid = gettid();
  timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_);
}

void FaultHandlers::start_block() {
  const char* given = getenv("XPUC_EMU_BLOCK_SECONDS");
  double seconds = given ? atof(given) : 20;
  itimerspec spec{};
  spec.it_value.tv_sec = time_t(seconds);
  spec.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9);
  spec.it_interval.tv_nsec = 50'000'000;
  timer_settime(timer_, 0, &spec, nullptr);
}

FaultHandlers::~FaultHandlers() {
  timer_delete(timer_);
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}
