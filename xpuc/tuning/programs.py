"""Candidates built: the kernels of a schedule with some knobs as a library, and how to call it.

They are built in processes of their own, several at a time; what crosses over is plain data.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from xpuc import interrupts
from xpuc.codegen import target
from xpuc.codegen.linker import export
from xpuc.schedules import Launch, Site, kernel_digest, launches, target_of
from xpuc.schedules.operands import outputs_of
from xpuc.tuning.candidates import Call, Candidate, Program, Tensor
from xpuc.tuning.roofs import Loop
from xpuc.tuning.tasks import Task, task_of


def program_of(site: Site, made: Sequence[Launch]) -> Program:
    """The program of a site's launches. Its result is what the last of them writes last."""
    tensors: list[Tensor] = []
    index: dict[Any, int] = {}

    def add(role: str, i: int, var: Any) -> None:
        index[var] = len(tensors)
        shape = tuple(_dimension(d) for d in var.ty.shape)
        tensors.append(Tensor(role, i, str(var.ty.dtype), shape))

    for i, var in enumerate(site.operands):
        add("operand", i, var)
    for i, var in enumerate(plane for w in site.weights for plane in w.planes):
        add("plane", i, var)
    calls = []
    for launch in made:
        for var in (*launch.zeros, *launch.outputs):
            add("new", len(tensors), var)
        args = tuple(index[v] for v in (*launch.inputs, *launch.outputs))
        calls.append(Call(launch.name, args))
    results = made[-1].outputs[-len(outputs_of(site.result)) :]
    return Program(tuple(calls), tuple(tensors), tuple(index[v] for v in results))


def _dimension(value: Any) -> int | str:
    name = getattr(value, "name", None)
    return int(value) if name is None else str(name)


class Builder:
    """Processes that build candidates into `folder`."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self._pool: ProcessPoolExecutor | None = None
        self._number = 0
        self._lock = threading.Lock()

    def build(self, task: Task, knobs: Iterable[Mapping[str, int]]) -> Iterator[Candidate]:
        """The candidates of these knobs, in their order; one that does not build says why."""
        futures = [(each, self._submit(task, each)) for each in knobs]
        for each, future in futures:
            try:
                yield future.result()
            except BrokenProcessPool:
                # A compiler that crashed took all of them along: whose fault it was shows alone.
                yield self._alone(task, each)

    def close(self) -> None:
        """End the processes; what they are at is lost."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _alone(self, task: Task, knobs: Mapping[str, int]) -> Candidate:
        try:
            return self._submit(task, knobs).result()
        except BrokenProcessPool:
            return Candidate(knobs, "", refused="the compiler crashed")

    def _submit(self, task: Task, knobs: Mapping[str, int]) -> Future[Candidate]:
        facts = (dict(task.facts), task.schedule.name, task.target.kind, task.target.cpu)
        with self._lock, interrupts.held_back():  # every board's thread builds
            self._number += 1
            job = partial(_build, facts, dict(knobs), self.folder / f"{self._number}.so")
            if self._pool is not None:
                with suppress(BrokenProcessPool):
                    return self._pool.submit(job)
            spawning = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, spawning)
            return self._pool.submit(job)


def _build(facts: tuple[Any, ...], knobs: dict[str, int], library: Path) -> Candidate:
    """In a process of the builder."""
    task = task_of(*facts)
    made = task.schedule.knobs_of(knobs)
    assert made is not None, f"{task.schedule.name} has no knobs {knobs}"
    digest = kernel_digest(task.schedule, task.site, made)
    try:
        parts = launches(task.schedule, task.site, made)
        compile_library([p.kernel for p in parts], task.target.kind, task.target.cpu, library)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1]
        return Candidate(knobs, digest, refused=reason)
    return Candidate(knobs, digest, program_of(task.site, parts), library)


def build_loops(machine: target.CompileTarget, folder: Path) -> tuple[Path, list[Loop]]:
    """The library of the kernels that measure a target's roofs, and what they are."""
    path, (kernels, loops) = folder / "roofs.so", loops_of(machine)
    compile_library(kernels, machine.facts.kind, machine.facts.cpu, path)
    return path, loops


def loops_of(machine: target.CompileTarget) -> tuple[list[Any], list[Loop]]:
    """The kernels that measure a target's roofs, under the names by which `Loop` has them."""
    made = target_of(machine.facts.kind).roof_loops(machine.facts)
    kernels = [each.kernel.with_attr("global_symbol", each.name) for each in made]
    loops = [
        Loop(each.name, each.elements, each.result,
             each.facts.get("bytes", 0), each.facts.get("operations", 0))
        for each in made
    ]  # fmt: skip
    return kernels, loops


def compile_library(kernels: Iterable[Any], kind: str, cpu: str, path: Path) -> None:
    """Build kernels into a library that TVM's runtime loads."""
    import tvm

    by_name = {str(k.attrs["global_symbol"]): k for k in kernels}
    built = tvm.compile(tvm.IRModule(by_name), target=target.resolve(kind, cpu).tvm)
    export(built, path)
