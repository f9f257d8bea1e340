"""Decode calls as CUDA graphs: captured once, then queued as a whole, for what one launch costs.

The first call of an entry point is made plainly: it loads the kernels, and the VM takes the memory
of its activations. A graph's launches keep what they were captured with, so that memory is held for
the graphs of that entry point, which use it in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from xpuc.artifact import Tail
from xpuc.runtime.calls import Calls
from xpuc.runtime.cuda_stream import Graph, Stream

log = logging.getLogger(__name__)
_TAKES_MEMORY = "vm.builtin.alloc_storage"
Entry = tuple[int, Tail]


class Graphs:
    """Those of a model. After the first that cannot be captured all calls are plain; `refusal` says
    why."""

    def __init__(self, calls: Calls, stream: Stream, *, is_on: bool) -> None:
        self.refusal: str | None = None
        self._is_on = is_on
        self._calls, self._stream = calls, stream
        self._storage: dict[Entry, list[Any]] = {}  # of the entry points that were called

    def call(
        self,
        known: dict[Hashable, Graph],
        key: Hashable,
        entry: Entry,
        arguments: Callable[[], list[Any]],
    ) -> None:
        """Queue a call; `known` are the graphs there are, and `key` says all that this one hangs on
        but its entry point."""
        if not self._is_on or self._calls.is_observed:
            self._calls.entries[entry](*arguments())
            return
        graph = known.get((entry, key))
        if graph is None and entry in self._storage:
            graph = self._captured(entry, arguments())
            if graph is not None:
                known[entry, key] = graph
        if graph is not None:
            graph.launch(self._stream)
        else:
            self._calls.entries[entry](*arguments())
            self._storage.setdefault(entry, [])

    def _captured(self, entry: Entry, arguments: list[Any]) -> Graph | None:
        """Nothing of the call has run."""
        held: list[Any] = []
        # What was held goes back to the pool, where the capture finds it.
        self._storage[entry] = held

        def see(name: str, _function: Any, before: bool, result: Any, _arguments: Any) -> None:
            if name == _TAKES_MEMORY and not before:
                held.append(result)

        try:
            with self._calls.observed(see), self._stream.captured() as graph:
                self._calls.entries[entry](*arguments)
        except Exception as error:
            self._is_on, self.refusal = False, (str(error).splitlines() or [repr(error)])[0]
            log.warning("CUDA graphs are off: a capture failed (%s)", self.refusal)
            return None
        return graph
