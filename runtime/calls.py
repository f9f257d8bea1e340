"""Calls of a model's entry points: what they take, and who makes them where the model lies.

A runner makes calls in the order in which they are asked for. On a device it does not wait for
them: `submit` gives a ticket for the result, `collect` waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
import tvm_ffi

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch, Result, Ticket
from xpuc.runtime.kv_pool import pages

Work = Callable[[], object]
See = Callable[[str, Any, bool, Any, tuple[Any, ...]], None]


@dataclass
class Calls:
    """What the calls of a model have in common.

    vm                the Relax VM of its library
    entries           the entry points by their rows (0: any number) and tail
    operands          K/V and weights, the tuple that decode calls take last
    prefill_operands  what those of prompts take: the same, and the int8 copies that were made
    is_observed       somebody is to be told of each call that the VM makes
    """

    vm: Any
    entries: Mapping[tuple[int, Tail], Any]
    operands: Any
    prefill_operands: Any
    max_out_rows: int
    n_vocab: int
    is_observed: bool = field(default=False, init=False)

    def operands_of(self, batch: Batch) -> Any:
        """The tuple that a call of the batch takes last."""
        return self.prefill_operands if batch.kind == "prefill" else self.operands

    @contextmanager
    def observed(self, see: See) -> Iterator[None]:
        """Inside, `see(name, function, is_before, result, arguments)` is told of every call before
        and after the VM makes it."""

        def called(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> int:
            see(name, function, before, result, arguments)
            return 0  # go on

        self.vm["set_instrument"](tvm_ffi.convert(called))
        self.is_observed = True
        try:
            yield
        finally:
            self.is_observed = False
            self.vm["set_instrument"](None)


class Runner(Protocol):
    """Makes the calls."""

    def submit(self, batch: Batch, *, tail: Tail, follows: Ticket | None = None) -> Ticket:
        """See StepModel."""
        ...

    def collect(self, ticket: Ticket) -> Result:
        """See StepModel."""
        ...

    @property
    def graph_refusal(self) -> str | None:
        """Why no graph could be made of a call."""
        ...

    def seconds(self, work: Work) -> float:
        """What takes `work`, to the end of what it queues."""
        ...

    def replayer(self, works: Sequence[tuple[str, Work]]) -> Callable[[], dict[str, float]]:
        """What does them all again, and gives the seconds of each name together."""
        ...


def replayer(works: Sequence[tuple[str, Work]]) -> Callable[[], dict[str, float]]:
    """Of works that are over when they return: in their order, so that caches hold what they hold
    in a step."""

    def replay() -> dict[str, float]:
        taken = dict.fromkeys((name for name, _ in works), 0.0)
        before = time.perf_counter()
        for name, work in works:
            work()
            now = time.perf_counter()
            taken[name] += now - before
            before = now
        return taken

    return replay


class HostRunner:
    """In the process: a call is over when it returns, and the arrays of a batch are its tensors."""

    graph_refusal = None

    def __init__(self, calls: Calls) -> None:
        n = calls.max_out_rows
        self._calls = calls
        self._results: dict[Tail, _Result] = {
            "greedy": _Result(pages((n,), "int32")),
            "logits": _Result(pages((n, calls.n_vocab), "float32")),
        }
        # Of the views of the batch: by id, as a tensor keeps its view.
        self._batch: Batch | None = None
        self._tensors: dict[int, Any] = {}

    def submit(self, batch: Batch, *, tail: Tail, follows: Ticket | None = None) -> Ticket:
        """See Runner."""
        assert follows is None, "a call is over before the next one is asked for"
        rows = 0 if batch.kind == "prefill" else batch.n_rows
        n_out, result = len(batch.out_rows), self._results[tail]
        written, operands = result.tensors[rows or n_out], self._calls.operands_of(batch)
        self._calls.entries[rows, tail](*self._index(batch), written, operands)
        return Ticket(result.rows(n_out))

    def collect(self, ticket: Ticket) -> Result:
        """See Runner."""
        assert ticket.rows is not None
        return ticket.rows

    def seconds(self, work: Work) -> float:
        """See Runner."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def replayer(self, works: Sequence[tuple[str, Work]]) -> Callable[[], dict[str, float]]:
        """See Runner."""
        return replayer(works)

    def _index(self, batch: Batch) -> list[Any]:
        """The batch's arrays as tensors, each converted once: those of decode calls when a batch
        is first seen."""
        views, tensors = batch.views, self._tensors
        if batch is not self._batch:
            self._batch = batch
            tensors.clear()
            tensors.update((id(view), tvm_ffi.from_dlpack(view)) for view in batch.kept())
        for view in views:
            if id(view) not in tensors:
                tensors[id(view)] = tvm_ffi.from_dlpack(view)
        return [tensors[id(view)] for view in views]


class _Result:
    """Where calls write.

    tensors  the leading rows of it, by their number
    """

    def __init__(self, whole: npt.NDArray[Any]) -> None:
        self._arrays = [whole[:n] for n in range(len(whole) + 1)]
        self._rows = list(whole) if whole.ndim > 1 else None
        self.tensors = [tvm_ffi.from_dlpack(each) for each in self._arrays]

    def rows(self, n: int) -> Result:
        """The first `n` rows."""
        return self._arrays[n] if self._rows is None else self._rows[:n]
