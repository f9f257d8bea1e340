// The symbols of libcuda.so.1 that TVM's CUDA runtime and the tests use.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "block.h"
#include "memory.h"
#include "stream.h"

namespace {

struct Module {
  void* library;
};

struct Function {
  const EmuKernel* kernel;
  std::string name;
  unsigned most_dynamic_bytes = 48 * 1024;  // until cuFuncSetAttribute raises it
};

// The arguments of a launch, copied when it is submitted.
class Arguments {
 public:
  Arguments(const EmuKernel& kernel, void** values) {
    for (unsigned i = 0; i < kernel.n_parameters; ++i) {
      begins_.push_back(slots_.size());
      slots_.resize(slots_.size() + (kernel.parameter_bytes[i] + sizeof(Slot) - 1) / sizeof(Slot));
      memcpy(&slots_[begins_[i]], values[i], kernel.parameter_bytes[i]);
    }
  }
  std::vector<void*> pointers() {
    std::vector<void*> result;
    for (size_t begin : begins_) result.push_back(&slots_[begin]);
    return result;
  }

 private:
  struct alignas(128) Slot {  // a CUtensorMap is aligned so
    char bytes[128];
  };
  std::vector<Slot> slots_;
  std::vector<size_t> begins_;
};

struct Launch {  // CUlaunchConfig
  unsigned grid[3], block[3], dynamic_bytes;
  void* stream;
  const struct Attribute* attributes;
  unsigned n_attributes;
};

struct Attribute {  // CUlaunchAttribute
  int id;
  char pad[4];
  unsigned value[16];
};

long n_launches = 0;
std::unordered_map<std::string, long> launches_of;

Status refuse(const char* text, ...) {
  char buffer[400];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  set_last_error(buffer);
  return kInvalidValue;
}

Status check(const Launch& launch, const Function& function) {
  const char* name = function.name.c_str();
  const unsigned *g = launch.grid, *b = launch.block;
  if (!g[0] || !g[1] || !g[2] || g[0] > 0x7fffffffu || g[1] > 65535 || g[2] > 65535) {
    return refuse("%s: grid (%u, %u, %u): at most (2147483647, 65535, 65535), at least 1", name,
                  g[0], g[1], g[2]);
  }
  if (!b[0] || !b[1] || !b[2] || b[0] > 1024 || b[1] > 1024 || b[2] > 64 ||
      b[0] * b[1] * b[2] > 1024) {
    return refuse("%s: block (%u, %u, %u): at most 1024 threads, 64 in z", name, b[0], b[1], b[2]);
  }
  unsigned bound = function.kernel->max_threads;
  if (bound && b[0] * b[1] * b[2] > bound) {
    return refuse("%s: %u threads, over its __launch_bounds__(%u)", name, b[0] * b[1] * b[2],
                  bound);
  }
  if (launch.dynamic_bytes > function.most_dynamic_bytes) {
    return refuse("%s: %u bytes of dynamic shared memory, %u allowed", name, launch.dynamic_bytes,
                  function.most_dynamic_bytes);
  }
  for (unsigned i = 0; i < launch.n_attributes; ++i) {
    const Attribute& a = launch.attributes[i];
    bool cluster = a.id == 4 && (a.value[0] > 1 || a.value[1] > 1 || a.value[2] > 1);
    if (cluster) return refuse("%s: thread block clusters are not emulated", name);
    if (a.id == 2 && a.value[0]) return refuse("%s: cooperative launch is not emulated", name);
  }
  return kSuccess;
}

std::string run(const Function& function, EmuDim grid, EmuDim block, unsigned dynamic_bytes,
                Arguments& arguments) {
  ++n_launches;
  ++launches_of[function.name];
  std::string error = running_block().run_grid(*function.kernel, arguments.pointers().data(), grid,
                                               block, dynamic_bytes);
  if (error.empty()) error = device_overrun();
  return error.empty() ? error : function.name + ": " + error;
}

}  // namespace

extern "C" {

// A module's image is "EMU:", the path of the library, and a zero byte.
Status cuModuleLoadData(void** module, const void* image) {
  const char* text = static_cast<const char*>(image);
  if (strncmp(text, "EMU:", 4)) {
    set_last_error("the image was not made by the emulator's compiler");
    return kInvalidImage;
  }
  void* library = dlopen(text + 4, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    set_last_error(dlerror());
    return kInvalidImage;
  }
  *module = new Module{library};
  return kSuccess;
}

// The library stays: a graph may still launch its kernels.
Status cuModuleUnload(void* module) {
  delete static_cast<Module*>(module);
  return kSuccess;
}

Status cuModuleGetFunction(void** function, void* module, const char* name) {
  static std::unordered_map<const void*, std::unique_ptr<Function>> functions;
  std::string symbol = std::string("emu_kernel_") + name;
  const void* found = dlsym(static_cast<Module*>(module)->library, symbol.c_str());
  if (!found) return kNotFound;
  auto& entry = functions[found];
  if (!entry) {
    entry = std::make_unique<Function>();
    entry->kernel = static_cast<const EmuKernel*>(found);
    entry->name = name;
  }
  *function = entry.get();
  return kSuccess;
}

Status cuFuncSetAttribute(void* function, int attribute, int value) {
  constexpr int kMaxDynamicSharedBytes = 8;
  if (attribute != kMaxDynamicSharedBytes) return kSuccess;
  if (value < 0 || size_t(value) > SharedMemory::kMostBytes) {
    return refuse("%d bytes of dynamic shared memory: a block has %zu", value,
                  SharedMemory::kMostBytes);
  }
  static_cast<Function*>(function)->most_dynamic_bytes = value;
  return kSuccess;
}

Status cuLaunchKernelEx(const Launch* launch, void* handle, void** values, void**) {
  const Function& function = *static_cast<Function*>(handle);
  if (Status status = check(*launch, function)) return status;
  auto arguments = std::make_shared<Arguments>(*function.kernel, values);
  EmuDim grid{launch->grid[0], launch->grid[1], launch->grid[2]};
  EmuDim block{launch->block[0], launch->block[1], launch->block[2]};
  return submit(stream_of(launch->stream),
                [&function, arguments, grid, block, bytes = launch->dynamic_bytes] {
                  return run(function, grid, block, bytes, *arguments);
                });
}

Status cuInit(unsigned) { return kSuccess; }

Status cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

Status cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}

Status cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;  // compute capability: major, minor
  return kSuccess;
}

Status cuDeviceGetName(char* name, int length, int) {
  snprintf(name, length, "emulated sm_90a");
  return kSuccess;
}

// Interleaved layouts and element strides other than 1 are not emulated.
Status cuTensorMapEncodeTiled(void* out, int type, unsigned rank, void* base,
                              const uint64_t* extent, const uint64_t* stride, const unsigned* box,
                              const unsigned* element_stride, int interleave, int swizzle, int,
                              int) {
  static constexpr unsigned kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (type < 0 || type > 12 || interleave || swizzle < 0 || swizzle > 3 || rank < 1 || rank > 5) {
    return refuse("this kind of tensor map is not emulated");
  }
  EmuTensorMap map{};
  map.base = static_cast<char*>(base);
  map.rank = rank;
  map.element_bytes = kBytes[type];
  map.swizzle = swizzle;
  if (reinterpret_cast<uintptr_t>(out) % 64) return refuse("TMA: the map is not aligned to 64 bytes");
  if (reinterpret_cast<uintptr_t>(base) % 16) return refuse("TMA: the address is no multiple of 16");
  if (box[0] * map.element_bytes % 16) return refuse("TMA: a box row is no multiple of 16 bytes");
  if (swizzle && box[0] * map.element_bytes > (16u << swizzle)) {
    return refuse("TMA: a box row of %u bytes, over its swizzle's span of %u",
                  box[0] * map.element_bytes, 16u << swizzle);
  }
  for (unsigned i = 0; i < rank; ++i) {
    map.extent[i] = extent[i];
    map.stride[i] = i ? stride[i - 1] : map.element_bytes;
    map.box[i] = box[i];
    if (element_stride[i] != 1) return refuse("TMA: element strides are not emulated");
    if (box[i] < 1 || box[i] > 256) return refuse("TMA: a box of %u: at most 256", box[i]);
    if (i && map.stride[i] % 16) return refuse("TMA: a stride is no multiple of 16 bytes");
  }
  memcpy(out, &map, sizeof map);
  return kSuccess;
}

Status cuGetErrorName(Status status, const char** name) {
  *name = status == kSuccess           ? "CUDA_SUCCESS"
          : status == kInvalidValue    ? "CUDA_ERROR_INVALID_VALUE"
          : status == kOutOfMemory     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == kInvalidImage    ? "CUDA_ERROR_INVALID_IMAGE"
          : status == kNotFound        ? "CUDA_ERROR_NOT_FOUND"
          : status == kIllegalAddress  ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : status == kLaunchFailed    ? "CUDA_ERROR_LAUNCH_FAILED"
                                       : "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
  return kSuccess;
}

Status cuGetErrorString(Status status, const char** text) {
  if (status == kSuccess || last_error().empty()) return cuGetErrorName(status, text);
  *text = last_error().c_str();
  return kSuccess;
}

// ---- for tests: what ran
long emu_launches() { return n_launches; }
long emu_graph_launches() { return graph_launches(); }
long emu_launches_of(const char* kernel) { return launches_of[kernel]; }
}
