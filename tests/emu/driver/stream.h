// Streams: queues of work that runs when somebody waits for it, as late as the hardware may, so that
// a missing wait shows. XPUC_EMU_STREAMS=eager runs everything at once instead.
#pragma once
#include <chrono>
#include <deque>
#include <functional>
#include <string>
#include <vector>

using Status = int;  // CUresult and cudaError_t: the values used here are the same in both
constexpr Status kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidImage = 200,
                 kNotFound = 500, kIllegalAddress = 700, kLaunchFailed = 719,
                 kCaptureUnsupported = 900, kCaptureInvalidated = 901;

using Operation = std::function<std::string()>;  // empty, or what went wrong

struct Graph {
  std::vector<Operation> operations;
};

struct Stream {
  std::deque<Operation> queue;
  size_t submitted = 0, done = 0;
  bool blocking = true;       // waits for the default stream, and it for this one
  Graph* capture = nullptr;   // what is submitted goes here and does not run
  bool capture_valid = true, capture_relaxed = false;
};

struct Event {
  Stream* stream = nullptr;
  size_t submitted = 0;  // of its stream, when it was recorded
  std::chrono::steady_clock::time_point time;
};

// The handle null (and cudaStreamLegacy) is the default stream.
Stream& stream_of(void* handle);
void* create_stream(bool blocking);
Status destroy_stream(void* handle);

// Adds work to the stream. An error of the work shows at a later wait.
Status submit(Stream& stream, Operation operation);
// Runs what was submitted to the stream, or to all of them. The first error since the last wait.
Status wait(Stream& stream);
Status wait_all();
// False, and the capture is spoilt, if a stream is being captured: it forbids waiting and allocating.
bool may_wait();

Status record(Event& event, Stream& stream);
Status wait_for(Stream& stream, const Event& event);
Status wait_for(const Event& event);

// Submits all of a graph as one piece of work.
Status launch(const Graph& graph, Stream& stream);
long graph_launches();

// The words of the last error.
const std::string& last_error();
void set_last_error(std::string text);
