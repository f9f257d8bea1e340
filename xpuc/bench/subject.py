"""The artifact whose engine is measured: its limits, and how to open an engine on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from xpuc.runtime.engine import Engine, load

Progress = Callable[[int, int], None]  # done, total


class Open(Protocol):
    """runtime.engine.load of one artifact, with the options that the measurements need.

    Each engine has a K/V pool of its own, of n_sequences * ctx tokens where memory affords it.
    """

    def __call__(
        self,
        *,
        ctx: int,
        n_sequences: int,
        warm_rows: int = 0,
        store: str | Path | None = None,
        chunk_budget_ms: float = ...,
        queue_bound: int = ...,
    ) -> Engine: ...


@dataclass(frozen=True)
class Subject:
    """context, max_batch, max_chunk and n_vocab are the manifest's."""

    open: Open
    context: int
    max_batch: int
    max_chunk: int
    n_vocab: int

    @classmethod
    def of(cls, artifact: Path, threads: int) -> Subject:
        """Of an artifact, whose kernels run in `threads`."""
        from xpuc.artifact import read_manifest

        found = read_manifest(artifact)
        return cls(
            partial(load, artifact, threads=threads),
            found.context, found.max_batch, found.max_chunk, found.n_vocab,
        )  # fmt: skip
