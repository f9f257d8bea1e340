"""Candidates: how their kernels are called, and the processes that build them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import sites

from xpuc.codegen import target
from xpuc.schedules import Site, cuda, launches, llvm, site_of
from xpuc.tuning import programs
from xpuc.tuning.candidates import Program
from xpuc.tuning.programs import Builder, program_of
from xpuc.tuning.tasks import Task


def task(site: Site) -> Task:
    """Of this machine."""
    schedule = next(s for s in llvm.SCHEDULES if s.op == site.op and s.accepts(site))
    return Task(site.facts(), target.resolve("llvm", None).facts, schedule, {}, ())


def program(site: Site) -> Program:
    schedule = next(s for s in llvm.SCHEDULES if s.op == site.op and s.accepts(site))
    return program_of(site, launches(schedule, site, schedule.knobs()))


def test_a_kernel_is_called_with_the_tasks_tensors_and_one_new() -> None:
    made = program(sites.linear(1, [("Q4_0", 32, 64)]))
    roles = [(t.role, t.index, t.dtype, t.shape) for t in made.tensors]
    assert roles[0] == ("operand", 0, "int8", (2, 1, 32))
    assert [role[:2] for role in roles] == [
        *(("operand", i) for i in range(4)), *(("plane", i) for i in range(2)), ("new", 6)
    ]  # fmt: skip
    assert roles[-1] == ("new", 6, "float32", (1, 32))
    (call,) = made.calls
    assert (call.function, call.args) == ("linear_q4_0_32x64_r1", (0, 1, 2, 3, 4, 5, 6))
    assert made.results == (6,)


def test_planes_are_counted_over_all_weights() -> None:
    made = program(sites.gate_up(1, [("Q4_0", 32, 64), ("Q4_1", 32, 64)]))
    planes = [t for t in made.tensors if t.role == "plane"]
    assert [t.index for t in planes] == list(range(len(planes)))
    assert len(planes) == sum(len(llvm.planes(f, 32, 64)) for f in ("Q4_0", "Q4_1"))
    assert len(made.results) == 4  # a quantised result


def test_a_count_that_kernels_leave_at_zero_is_no_result_and_given_by_nobody() -> None:
    machine = target.resolve("cuda", "sm_90a").facts
    site = site_of(sites.attention(2, quantize=True).facts(), machine, cuda.planes)
    schedule = next(s for s in cuda.SCHEDULES if s.op == site.op and s.accepts(site))
    (launch,) = launches(schedule, site, schedule.knobs())
    made = program_of(site, [launch])
    counts = next(t for t in made.tensors if t.dtype == "int32" and t.shape == (2, 2))
    assert counts.role == "new"
    assert made.tensors.index(counts) not in made.results
    assert len(made.results) == 4
    assert made.results == made.calls[0].args[-4:]


def test_what_one_kernel_writes_another_reads() -> None:
    made = program(sites.attention(3))
    split, reduce = made.calls
    new = [i for i, t in enumerate(made.tensors) if t.role == "new"]
    between, results = new[: -len(made.results)], new[-len(made.results) :]
    assert set(between) <= set(split.args)
    assert set(between) <= set(reduce.args)
    assert made.results == tuple(results)
    assert not set(results) & set(split.args)
    # As many items of work as the call will have.
    assert {made.tensors[i].shape[0] for i in between} == {"w"}


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Builder]:
    made = Builder(tmp_path, 2)
    yield made
    made.close()


KNOBS = [{"prefetch_bytes": n} for n in (512, 0, 256)]


@pytest.mark.slow
def test_candidates_come_in_order_and_a_compiler_that_is_killed_loses_none(
    builder: Builder,
) -> None:
    where = task(sites.linear(1, [("Q8_0", 24, 64)]))
    first = list(builder.build(where, KNOBS))
    assert [c.knobs for c in first] == KNOBS
    assert len({c.kernel for c in first}) == len({c.library for c in first}) == 3
    assert all(c.library is not None and c.library.exists() and not c.refused for c in first)
    own = psutil.Process()
    compilers = [p for p in own.children() if "spawn_main" in " ".join(p.cmdline())]
    assert compilers
    for compiler in compilers:
        os.kill(compiler.pid, signal.SIGINT)  # Ctrl-C is for the session
    psutil.wait_procs(compilers, timeout=0.2)
    assert all(compiler.is_running() for compiler in compilers)
    for compiler in compilers:
        compiler.kill()
    again = list(builder.build(where, KNOBS))
    assert [(c.knobs, c.kernel, c.refused) for c in again] == [
        (c.knobs, c.kernel, c.refused) for c in first
    ]
    assert not {c.library for c in first} & {c.library for c in again}


def test_what_does_not_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("LLVM says:\nno registers left")

    monkeypatch.setattr(programs, "compile_library", fails)
    where = task(sites.linear(1, [("Q8_0", 24, 64)]))
    facts = (dict(where.facts), where.schedule.name, where.target.kind, where.target.cpu)
    candidate = programs._build(facts, {"prefetch_bytes": 0}, tmp_path / "1.so")
    assert candidate.refused == "no registers left"
    assert candidate.library is None
    assert candidate.kernel


def test_knobs_that_make_the_same_kernel_have_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "compile_library", lambda *_: None)
    where = task(sites.linear(1, [("Q8_0", 24, 64)]))
    facts = (dict(where.facts), where.schedule.name, where.target.kind, where.target.cpu)
    kernels = [
        programs._build(facts, knobs, tmp_path / "1.so").kernel
        for knobs in ({"m_tile": 8}, {"m_tile": 64}, {"prefetch_bytes": 0})
    ]
    assert kernels[0] == kernels[1] != kernels[2]
