// The shared memory of the running block: the dynamic part, then the __shared__ arrays as the
// threads reach them, poison in all of it, and a gap after each that nobody may write.
#pragma once
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

class SharedMemory {
 public:
  static constexpr size_t kMostBytes = 232448;  // of a block of sm_90
  static constexpr size_t kMostStaticBytes = 48 * 1024;

  void reset(size_t dynamic_bytes);
  char* base() const { return base_; }
  // The array of this declaration; it is made for the first thread that asks.
  void* array(const void* key, size_t bytes);
  // The 32-bit address of PTX, and back. Both end the thread where it is outside.
  void* pointer(unsigned address) const;
  // Empty, or which array was written past its end.
  std::string overrun() const;

 private:
  struct Array {
    const void* key;
    char* begin;
    size_t bytes;
  };
  void guard(char* end);

  char* base_ = nullptr;
  size_t used_ = 0, static_bytes_ = 0, dynamic_bytes_ = 0;
  std::vector<Array> arrays_;
  std::vector<char*> guards_;
};
