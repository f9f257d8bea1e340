// The symbols of libcudart.so.13 that TVM's CUDA runtime and the tests use.
#include <cstring>
#include <memory>

#include "memory.h"
#include "shared_memory.h"
#include "stream.h"

extern "C" Status cuGetErrorName(Status status, const char** name);
extern "C" Status cuGetErrorString(Status status, const char** text);

namespace {

constexpr size_t kDeviceBytes = size_t(16) << 30;

enum CopyKind { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };

Status last_status = kSuccess;

Status told(Status status) {
  if (status != kSuccess) last_status = status;
  return status;
}

Status invalid(const char* text) {
  set_last_error(text);
  return told(kInvalidValue);
}

Status allocate(void** pointer, void* (*allocator)(size_t), size_t bytes) {
  if (!may_wait()) return told(kCaptureUnsupported);
  *pointer = nullptr;
  if (bytes == 0) return kSuccess;
  if (device_bytes() + bytes <= kDeviceBytes) *pointer = allocator(bytes);
  if (*pointer) return kSuccess;
  set_last_error("out of memory");
  return told(kOutOfMemory);
}

// Freeing waits for the device, as CUDA's does. What went wrong shows at the next wait.
Status release(void* pointer, bool (*releaser)(void*)) {
  if (!pointer) return kSuccess;
  if (!may_wait()) return told(kCaptureUnsupported);
  Status status = wait_all();
  bool released = releaser(pointer);
  return released ? told(status) : invalid("freed what was not allocated");
}

// Work of a copy whose host memory is not pinned: the source is read before the call returns.
Operation copy_from_host(void* to, const void* from, size_t bytes) {
  const char* begin = static_cast<const char*>(from);
  auto snapshot = std::make_shared<std::vector<char>>(begin, begin + bytes);
  return [to, snapshot] {
    memcpy(to, snapshot->data(), snapshot->size());
    return std::string();
  };
}

}  // namespace

extern "C" {

Status cudaGetDeviceCount(int* count) {
  *count = 1;
  return kSuccess;
}

Status cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}

Status cudaSetDevice(int device) { return device == 0 ? kSuccess : invalid("there is one device"); }

Status cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {  // cudaDeviceAttr
    case 1: case 2: case 3: *value = 1024; break;             // threads per block, and in x, y
    case 4: *value = 64; break;                               // in z
    case 8: *value = 48 * 1024; break;                        // shared bytes per block
    case 10: *value = 32; break;                              // warp size
    case 12: *value = 65536; break;                           // registers per block
    case 13: *value = 1980000; break;                         // clock, kHz
    case 16: *value = 132; break;                             // multiprocessors
    case 38: *value = 1 << 20; break;                         // L2 bytes: few, emptied at once
    case 75: *value = 9; break;                               // compute capability
    case 76: *value = 0; break;
    case 97: *value = SharedMemory::kMostBytes; break;        // shared bytes, opted in
    default: *value = 0;
  }
  return kSuccess;
}

Status cudaGetDeviceProperties(void* properties, int) {
  strcpy(static_cast<char*>(properties), "emulated sm_90a");  // name[256] comes first
  return kSuccess;
}

Status cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, allocate_device, bytes); }
Status cudaMallocHost(void** pointer, size_t bytes) {
  return allocate(pointer, allocate_pinned, bytes);
}
Status cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return allocate(pointer, allocate_pinned, bytes);
}
Status cudaFree(void* pointer) { return release(pointer, free_device); }
Status cudaFreeHost(void* pointer) { return release(pointer, free_pinned); }

Status cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kDeviceBytes;
  *free = kDeviceBytes - device_bytes();
  return kSuccess;
}

Status cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* handle) {
  if (bytes == 0) return kSuccess;
  bool to_device = is_device(to, bytes), from_device = is_device(from, bytes);
  bool fits = kind == kDefault || (kind == kHostToDevice && to_device) ||
              (kind == kDeviceToHost && from_device) ||
              (kind == kDeviceToDevice && to_device && from_device) || kind == kHostToHost;
  if (!fits) return invalid("a copy reaches outside a device allocation");
  Stream& stream = stream_of(handle);
  if (!from_device && !is_pinned(from)) {
    return told(submit(stream, copy_from_host(to, from, bytes)));
  }
  Status status = submit(stream, [to, from, bytes] {
    memmove(to, from, bytes);
    return std::string();
  });
  // A copy into pageable memory is complete when the call returns.
  bool pageable = !to_device && !is_pinned(to);
  return told(status != kSuccess || !pageable ? status : wait(stream));
}

Status cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, kDeviceToDevice, stream);
}

Status cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  if (!may_wait()) return told(kCaptureUnsupported);
  Status status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return status != kSuccess ? status : told(wait(stream_of(nullptr)));
}

Status cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  if (!is_device(to, bytes)) return invalid("a fill reaches outside a device allocation");
  return told(submit(stream_of(stream), [to, value, bytes] {
    memset(to, value, bytes);
    return std::string();
  }));
}

Status cudaDeviceSynchronize() { return told(may_wait() ? wait_all() : kCaptureUnsupported); }

// ---- streams and events

Status cudaStreamCreate(void** stream) {
  *stream = create_stream(true);
  return kSuccess;
}
Status cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  constexpr unsigned kNonBlocking = 1;
  *stream = create_stream(!(flags & kNonBlocking));
  return kSuccess;
}
Status cudaStreamDestroy(void* stream) { return told(destroy_stream(stream)); }
Status cudaStreamSynchronize(void* stream) { return told(wait(stream_of(stream))); }
Status cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  return told(wait_for(stream_of(stream), *static_cast<Event*>(event)));
}

Status cudaEventCreate(void** event) {
  *event = new Event;
  return kSuccess;
}
Status cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
Status cudaEventDestroy(void* handle) {
  auto* event = static_cast<Event*>(handle);
  Status status = wait_for(*event);
  delete event;
  return told(status);
}
Status cudaEventRecord(void* event, void* stream) {
  return told(record(*static_cast<Event*>(event), stream_of(stream)));
}
Status cudaEventSynchronize(void* event) { return told(wait_for(*static_cast<Event*>(event))); }
Status cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
  auto time = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
  *milliseconds = std::chrono::duration<float, std::milli>(time).count();
  return kSuccess;
}

// ---- graphs

Status cudaStreamBeginCapture(void* handle, int mode) {
  constexpr int kRelaxed = 2;
  Stream& stream = stream_of(handle);
  if (&stream == &stream_of(nullptr)) return invalid("the default stream cannot be captured");
  if (stream.capture) return invalid("the stream is being captured already");
  stream.capture = new Graph;
  stream.capture_valid = true;
  stream.capture_relaxed = mode == kRelaxed;
  return kSuccess;
}

Status cudaStreamEndCapture(void* handle, void** graph) {
  Stream& stream = stream_of(handle);
  if (!stream.capture) return invalid("the stream is not being captured");
  Graph* captured = stream.capture;
  stream.capture = nullptr;
  *graph = stream.capture_valid ? captured : nullptr;
  return told(stream.capture_valid ? kSuccess : kCaptureInvalidated);
}

Status cudaGraphInstantiate(void** executable, void* graph, unsigned long long) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  return kSuccess;
}

Status cudaGraphLaunch(void* graph, void* stream) {
  return told(launch(*static_cast<Graph*>(graph), stream_of(stream)));
}

Status cudaGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kSuccess;
}
Status cudaGraphExecDestroy(void* graph) { return cudaGraphDestroy(graph); }

// ---- errors

Status cudaGetLastError() {
  Status status = last_status;
  last_status = kSuccess;
  return status;
}
Status cudaPeekAtLastError() { return last_status; }
const char* cudaGetErrorName(Status status) {
  const char* name;
  cuGetErrorName(status, &name);
  return name;
}
const char* cudaGetErrorString(Status status) {
  const char* text;
  cuGetErrorString(status, &text);
  return text;
}
}
