"""What the block store costs while it saves: evicted blocks are written as a step is planned."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from xpuc.bench.load import Load, LoadResult, pool_sizes
from xpuc.bench.quantiles import Quantiles, quantiles
from xpuc.bench.subject import Progress, Subject
from xpuc.bench.workload import Arrival
from xpuc.runtime.blocks import OnEvict


@dataclass(frozen=True)
class Saving:
    """Of the blocks that were evicted (those that are in the store already are not written again),
    and of all steps' time the part that they took."""

    us: Quantiles
    of_steps: float


@dataclass(frozen=True)
class Served:
    """A workload's times, and what saving took if there was a store."""

    load: LoadResult
    saving: Saving | None


def serve(
    subject: Subject,
    arrivals: list[Arrival],
    budget_ms: float,
    store: Path | None,
    progress: Progress,
) -> Served:
    """`store`: an empty folder, or None for an engine without one."""
    with subject.open(
        **pool_sizes(subject, arrivals), warm_rows=subject.max_chunk, store=store,
        chunk_budget_ms=budget_ms, queue_bound=len(arrivals),
    ) as engine:  # fmt: skip
        us: list[float] = []
        for group in engine.kv.groups:
            if group.pool.on_evict is not None:
                group.pool.on_evict = _timed(group.pool.on_evict, us)
        load = Load(engine, arrivals)
        load.run(progress)
        engine.kv.check()
        if engine.store is None:
            return Served(load.result(), None)
        total_us = sum(each.total_ns for each in load.records) / 1000
        saving = Saving(quantiles(us), sum(us) / total_us)
        return Served(load.result(), saving)


def _timed(save: OnEvict, us: list[float]) -> OnEvict:
    """`save`, with the time that each call takes added to `us`."""

    def timed(block: int, digest: bytes) -> None:
        start = time.perf_counter_ns()
        save(block, digest)
        us.append((time.perf_counter_ns() - start) / 1000)

    return timed
