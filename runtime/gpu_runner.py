"""Calls on a GPU, queued on one stream: what a batch changed is sent, the result is brought back.

The arrays of a batch have a copy on the GPU, at fixed places. What changed goes through pinned
memory, of which there are two pieces in turn, so that a step is described and queued while the one
before it runs. A decode call writes its ids where it reads its tokens, so the ids of a step are the
tokens of one that follows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm_ffi

from xpuc.artifact import Tail
from xpuc.runtime.arrays import Leading
from xpuc.runtime.batch import Batch, Result, Ticket
from xpuc.runtime.calls import Calls, Work
from xpuc.runtime.cuda_stream import Event, Graph, Stream, pinned, seconds
from xpuc.runtime.dlpack import Int32At
from xpuc.runtime.graphs import Graphs
from xpuc.runtime.places import Gpu


class GpuRunner:
    """See Runner."""

    def __init__(self, calls: Calls, gpu: Gpu, *, graphs: bool) -> None:
        self._calls, self._gpu = calls, gpu
        self._stream = Stream()
        self._on_stream = tvm_ffi.use_raw_stream(gpu.device, self._stream.handle.value or 0)
        self._graphs = Graphs(calls, self._stream, is_on=graphs)
        n, n_vocab = calls.max_out_rows, calls.n_vocab
        self._ids = gpu.empty((n,), "int32")  # of calls that are no decode calls
        self._logits = gpu.empty((n, n_vocab), "float32")
        self._fetched = pinned(n * n_vocab * 4).view(np.float32).reshape(n, n_vocab)
        self._rows = list(self._fetched)
        self._mirrors: weakref.WeakKeyDictionary[Batch, _Mirror] = weakref.WeakKeyDictionary()

    @property
    def graph_refusal(self) -> str | None:
        """See Runner."""
        return self._graphs.refusal

    def submit(self, batch: Batch, *, tail: Tail, follows: Ticket | None = None) -> Ticket:
        """See Runner."""
        mirror = self._mirrors.get(batch)
        if mirror is None:
            mirror = self._mirrors[batch] = _Mirror(batch, self._gpu, self._calls.max_out_rows)
        slot = mirror.next_slot()
        if follows is not None and (follows is not mirror.newest or batch.kind == "prefill"):
            ids = self.collect(follows)
            batch.tokens[: len(ids)] = ids
            follows = None
        mirror.send(batch, slot, self._stream, tokens=follows is None)
        with self._on_stream:
            result = self._call(batch, mirror, tail)
        n_out = len(batch.out_rows)
        ticket = slot.ticket = Ticket(n_rows=n_out, slot=slot)
        mirror.newest = ticket if tail != "logits" and batch.kind != "prefill" else None
        address = result.data_ptr()
        if tail == "logits":
            self._stream.to_host(
                self._fetched.ctypes.data, address, n_out * self._fetched.strides[0]
            )
            slot.event.record(self._stream)
            slot.event.wait()
            slot.ticket, ticket.rows = None, self._rows[:n_out]
        else:
            self._stream.to_host(slot.ids_at, address, n_out * 4)
            slot.event.record(self._stream)
        return ticket

    def collect(self, ticket: Ticket) -> Result:
        """See Runner."""
        if ticket.rows is None:
            slot: _Slot = ticket.slot
            slot.event.wait()
            slot.ticket, ticket.rows = None, slot.ids[: ticket.n_rows]
        return ticket.rows

    def seconds(self, work: Work) -> float:
        """See Runner. By the clock of the GPU, without what queueing the first of it takes."""
        with self._on_stream:
            return seconds(self._stream, work)

    def replayer(self, works: Sequence[tuple[str, Work]]) -> Callable[[], dict[str, float]]:
        """See Runner. Those of a name are a graph: Python queues them too slowly one by one."""
        named: dict[str, list[Work]] = {}
        for name, work in works:
            named.setdefault(name, []).append(work)
        graphs = {name: self._graph(each) for name, each in named.items()}

        def replay() -> dict[str, float]:
            return {
                name: seconds(self._stream, partial(graph.launch, self._stream))
                for name, graph in graphs.items()
            }

        return replay

    def _graph(self, works: Sequence[Work]) -> Graph:
        with self._on_stream, self._stream.captured() as graph:
            for work in works:
                work()
        return graph

    def _call(self, batch: Batch, mirror: _Mirror, tail: Tail) -> Any:
        """Queue the call; the tensor that it writes, of all rows."""
        is_decode = batch.kind != "prefill"
        n_written = batch.n_rows if is_decode else len(batch.out_rows)
        if tail == "logits":
            result = self._gpu.view(self._logits, (n_written, self._calls.n_vocab), "float32", 0)
        elif is_decode:
            result = mirror.tensor(batch.arrays[0][0], n_written)
        else:
            result = self._gpu.view(self._ids, (n_written,), "int32", 0)

        def arguments() -> list[Any]:
            arrays = (*batch.arrays, batch.sampling) if tail == "sampled" else batch.arrays
            index = [mirror.tensor(whole, n) for whole, n in arrays]
            return [*index, result, self._calls.operands_of(batch)]

        entry = (batch.n_rows if is_decode else 0, tail)
        if is_decode:
            self._graphs.call(mirror.graphs, batch.n_work, entry, arguments)
        else:
            self._calls.entries[entry](*arguments())
        return result


class _Slot:
    """Pinned memory of a step: what it sends, and the ids it gives, which are there after `event`.

    ticket  of the step, until its result was taken
    """

    def __init__(self, n_bytes: int, n_ids: int) -> None:
        self.staging, self.ids = pinned(n_bytes), pinned(4 * n_ids).view(np.int32)
        self.staging_at, self.ids_at = self.staging.ctypes.data, self.ids.ctypes.data
        self.event = Event()
        self.ticket: Ticket | None = None


class _Mirror:
    """The arrays of a batch on the GPU."""

    def __init__(self, batch: Batch, gpu: Gpu, n_ids: int) -> None:
        self._gpu = gpu
        self._block = gpu.tensor(batch.memory)
        self._at = self._block.data_ptr()
        self._slots = [_Slot(batch.memory.nbytes, n_ids) for _ in range(2)]
        self._tensors: dict[tuple[int, int], Int32At] = {}
        self.graphs: dict[Hashable, Graph] = {}
        self.newest: Ticket | None = None  # whose ids the tokens of decode calls are now

    def next_slot(self) -> _Slot:
        """The one used longest ago; a result that nobody has taken from it goes to its ticket."""
        self._slots.reverse()
        slot = self._slots[0]
        if slot.ticket is not None:
            slot.event.wait()
            slot.ticket.rows = slot.ids[: slot.ticket.n_rows].copy()
            slot.ticket = None
        return slot

    def send(self, batch: Batch, slot: _Slot, stream: Stream, *, tokens: bool) -> None:
        """Queue what the step changed; not its tokens if these are there."""
        for start, end in batch.changed(tokens=tokens):
            slot.staging[start:end] = batch.memory[start:end]
            stream.to_device(self._at + start, slot.staging_at + start, end - start)

    def tensor(self, whole: Leading, n: int) -> Any:
        """The first `n` entries of an array."""
        found = self._tensors.get((whole.start, n))
        if found is None:
            shape = (n, *whole.all.shape[1:])
            found = Int32At(self._at + whole.start, shape, self._gpu.dlpack_device)
            self._tensors[whole.start, n] = found
        return found.tensor
