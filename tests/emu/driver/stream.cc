#include "stream.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

Stream default_stream;
std::vector<std::unique_ptr<Stream>> streams;
std::string pending_error;  // of work that ran, not yet told to anyone
std::string error_text;
long n_graph_launches = 0;

bool eager() {
  const char* mode = getenv("XPUC_EMU_STREAMS");
  return mode && !strcmp(mode, "eager");
}

void drop_all_work() {
  default_stream.queue.clear();
  default_stream.done = default_stream.submitted;
  for (auto& stream : streams) {
    stream->queue.clear();
    stream->done = stream->submitted;
  }
}

// Runs the stream until `upto` of its operations are done. After an error nothing more runs.
void run(Stream& stream, size_t upto) {
  while (stream.done < upto && !stream.queue.empty()) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    ++stream.done;
    std::string error = operation();
    if (error.empty()) continue;
    if (pending_error.empty()) pending_error = error;
    drop_all_work();
  }
}

Status take_error() {
  if (pending_error.empty()) return kSuccess;
  bool address = pending_error.find("illegal access") != std::string::npos;
  set_last_error(std::move(pending_error));
  pending_error.clear();
  return address ? kIllegalAddress : kLaunchFailed;
}

void append(Stream& stream, Operation operation) {
  stream.queue.push_back(std::move(operation));
  ++stream.submitted;
  if (eager()) run(stream, stream.submitted);
}

// Whether a blocking stream is being captured, for which the default stream would wait.
bool spoils_capture(const char* what) {
  bool spoils = false;
  for (auto& stream : streams) {
    if (!stream->capture || !stream->blocking) continue;
    stream->capture_valid = false;
    set_last_error(what);
    spoils = true;
  }
  return spoils;
}

Operation run_first(Stream& other) {
  return [&other, upto = other.submitted] {
    run(other, upto);
    return std::string();
  };
}

}  // namespace

Stream& stream_of(void* handle) {
  return reinterpret_cast<uintptr_t>(handle) <= 2 ? default_stream : *static_cast<Stream*>(handle);
}

void* create_stream(bool blocking) {
  streams.push_back(std::make_unique<Stream>());
  streams.back()->blocking = blocking;
  return streams.back().get();
}

// Work that was submitted still runs, as the hardware's does; events may refer to it for ever.
Status destroy_stream(void* handle) {
  for (auto& stream : streams) {
    if (stream.get() != handle) continue;
    run(*stream, stream->submitted);
    stream->blocking = false;
    return kSuccess;
  }
  return kInvalidValue;
}

Status submit(Stream& stream, Operation operation) {
  if (stream.capture) {
    stream.capture->operations.push_back(std::move(operation));
    return kSuccess;
  }
  if (&stream == &default_stream) {
    if (spoils_capture("work was submitted to the default stream during a capture")) {
      return kCaptureUnsupported;
    }
    for (auto& other : streams) {
      if (other->blocking && other->done < other->submitted) append(stream, run_first(*other));
    }
  } else if (stream.blocking && default_stream.done < default_stream.submitted) {
    append(stream, run_first(default_stream));
  }
  append(stream, std::move(operation));
  return kSuccess;
}

Status wait(Stream& stream) {
  if (stream.capture) {
    stream.capture_valid = false;
    set_last_error("a stream that is being captured was waited for");
    return kCaptureUnsupported;
  }
  if (&stream == &default_stream &&
      spoils_capture("the default stream was waited for during a capture")) {
    return kCaptureUnsupported;
  }
  run(stream, stream.submitted);
  return take_error();
}

Status wait_all() {
  run(default_stream, default_stream.submitted);
  for (auto& stream : streams) run(*stream, stream->submitted);
  return take_error();
}

bool may_wait() {
  bool may = true;
  for (auto& stream : streams) {
    if (!stream->capture || stream->capture_relaxed) continue;
    stream->capture_valid = false;
    set_last_error("memory was allocated, freed or waited for during a capture");
    may = false;
  }
  return may;
}

Status record(Event& event, Stream& stream) {
  event.stream = &stream;
  Status status = submit(stream, [&event] {
    event.time = std::chrono::steady_clock::now();
    return std::string();
  });
  event.submitted = stream.submitted;
  return status;
}

Status wait_for(Stream& stream, const Event& event) {
  if (!event.stream || event.stream == &stream) return kSuccess;
  if (event.stream->capture || stream.capture) {
    set_last_error("events between captured streams are not emulated");
    return kCaptureUnsupported;
  }
  Stream& other = *event.stream;
  return submit(stream, [&other, upto = event.submitted] {
    run(other, upto);
    return std::string();
  });
}

Status wait_for(const Event& event) {
  if (!event.stream) return kSuccess;
  run(*event.stream, event.submitted);
  return take_error();
}

Status launch(const Graph& graph, Stream& stream) {
  return submit(stream, [operations = graph.operations] {
    ++n_graph_launches;
    for (const Operation& operation : operations) {
      std::string error = operation();
      if (!error.empty()) return error;
    }
    return std::string();
  });
}

long graph_launches() { return n_graph_launches; }

const std::string& last_error() { return error_text; }
void set_last_error(std::string text) { error_text = std::move(text); }
