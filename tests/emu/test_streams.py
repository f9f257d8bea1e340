"""Streams run as late as they may, so that a missing wait shows; events, graphs."""

from __future__ import annotations

import gc
from ctypes import byref, c_size_t, c_void_p

import numpy as np
import pytest
from emu import fake_driver, raw
from emu.raw import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaError, Memory, Module

from xpuc.runtime import cuda_stream

ADD = 'extern "C" __global__ void add(float* x, const float* y) { x[0] += y[0]; }'


def one(value: float) -> Memory:
    return Memory.of(np.array([value], np.float32))


def pinned(value: float) -> np.ndarray:
    """An array of one float in pinned memory."""
    pointer = c_void_p()
    raw.call("cudaMallocHost", byref(pointer), c_size_t(4))
    array = np.ctypeslib.as_array((raw.ctypes.c_float * 1).from_address(pointer.value))
    array[0] = value
    return array


def copy(to: object, source: object, kind: int, stream: object = None) -> None:
    raw.call("cudaMemcpyAsync", to, source, c_size_t(4), kind, stream)


def address(array: np.ndarray) -> c_void_p:
    return c_void_p(array.ctypes.data)


def test_work_waits_to_be_waited_for(monkeypatch):
    module, stream, x = Module(ADD), raw.create_stream(), one(1)
    before = fake_driver.launches("add")
    module.launch("add", 1, 1, x, one(2), stream=stream)
    assert fake_driver.launches("add") == before
    raw.synchronize(stream)
    assert fake_driver.launches("add") == before + 1
    monkeypatch.setenv("XPUC_EMU_STREAMS", "eager")
    module.launch("add", 1, 1, x, one(2), stream=stream)
    assert fake_driver.launches("add") == before + 2
    assert x.read()[0] == 5


def test_an_error_shows_at_the_next_wait_and_only_there():
    module = Module('extern "C" __global__ void bad(float* x) { x[1 << 30] = 0; }')
    stream, x = raw.create_stream(), one(0)
    module.launch("bad", 1, 1, x, stream=stream)
    with pytest.raises(CudaError, match="bad: illegal access"):
        raw.synchronize(stream)
    raw.synchronize(stream)


def test_pinned_memory_is_read_late_and_other_memory_at_once():
    x, y, late, now = one(0), one(0), pinned(1), np.ones(1, np.float32)
    stream = raw.create_stream()
    copy(x.pointer, address(late), HOST_TO_DEVICE, stream)
    copy(y.pointer, address(now), HOST_TO_DEVICE, stream)
    late[0] = now[0] = 2  # too early for the first
    raw.synchronize(stream)
    assert (x.read()[0], y.read()[0]) == (2, 1)


def test_a_result_in_pinned_memory_is_there_after_the_wait():
    out, stream = pinned(0), raw.create_stream()
    copy(address(out), one(3).pointer, DEVICE_TO_HOST, stream)
    assert out[0] == 0
    raw.synchronize(stream)
    assert out[0] == 3


def test_non_blocking_streams_need_events():
    module = Module(ADD)
    for with_event in (False, True):
        x, y = one(0), one(1)
        first, second = (raw.create_stream(blocking=False) for _ in range(2))
        module.launch("add", 1, 1, y, one(10), stream=first)
        if with_event:
            event = raw.create_event()
            raw.call("cudaEventRecord", event, first)
            raw.call("cudaStreamWaitEvent", second, event, 0)
        module.launch("add", 1, 1, x, y, stream=second)
        raw.synchronize(second)
        assert x.read()[0] == (11 if with_event else 1)


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it():
    module, x, y = Module(ADD), one(0), one(1)
    stream = raw.create_stream()
    module.launch("add", 1, 1, y, one(10), stream=stream)
    module.launch("add", 1, 1, x, y)
    module.launch("add", 1, 1, y, x, stream=stream)
    raw.synchronize(stream)
    assert (x.read()[0], y.read()[0]) == (11, 22)


def test_events_are_waited_for_and_timed():
    stream, start, end = raw.create_stream(), raw.create_event(), raw.create_event()
    raw.call("cudaEventRecord", start, stream)
    Module(ADD).launch("add", 1, 1, one(1), one(2), stream=stream)
    raw.call("cudaEventRecord", end, stream)
    raw.call("cudaEventSynchronize", end)
    elapsed = raw.ctypes.c_float(-1)
    raw.call("cudaEventElapsedTime", byref(elapsed), start, end)
    assert elapsed.value >= 0


def test_a_graph_replays_with_the_arguments_it_was_captured_with():
    module, stream, x, y = Module(ADD), raw.create_stream(), one(0), one(1)
    before = fake_driver.launches()
    with raw.captured(stream) as graph:
        module.launch("add", 1, 1, x, y, stream=stream)
        module.launch("add", 1, 1, y, x, stream=stream)
    assert fake_driver.launches() == before
    for _ in range(3):
        raw.call("cudaGraphLaunch", graph, stream)
    raw.synchronize(stream)
    assert fake_driver.launches() == before + 6
    assert (x.read()[0], y.read()[0]) == (8, 13)


FORBIDDEN = {
    "allocating": lambda stream, x: Memory(4),
    "freeing": lambda stream, x: x.free(),
    "waiting": lambda stream, x: raw.synchronize(stream),
    "waiting for the default stream": lambda stream, x: raw.call("cudaStreamSynchronize", None),
    "the default stream": lambda stream, x: Module(ADD).launch("add", 1, 1, x, x),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_capture_forbids_spoils_it(what):
    stream, x, graph = raw.create_stream(), one(0), c_void_p()
    raw.call("cudaStreamBeginCapture", stream, 0)
    with pytest.raises(CudaError, match="capture"):
        FORBIDDEN[what](stream, x)
    with pytest.raises(CudaError):
        raw.call("cudaStreamEndCapture", stream, byref(graph))
    raw.synchronize()


def test_no_garbage_is_collected_during_a_capture():
    """It may hold memory of a GPU, and to free that spoils the capture."""
    stream, source, x = cuda_stream.Stream(), cuda_stream.pinned(4), one(3)
    garbage: list[object] = [cuda_stream.pinned(4)]
    garbage.append(garbage)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with stream.captured() as graph:
            stream.to_device(x.pointer.value, source.ctypes.data, 4)
            del garbage
            assert [[] for _ in range(1000)]  # what a collection would come with
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    graph.launch(stream)
    raw.synchronize(stream.handle)
    assert x.read()[0] == 0
