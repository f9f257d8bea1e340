"""Candidates for a GPU judged by their code: what is refused and why, and who comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import sites

from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.sass import Instruction, Sass
from xpuc.codegen.target import resolve
from xpuc.errors import XpucError
from xpuc.schedules import Site, cuda, launches, site_of
from xpuc.schedules.cuda.grid import launch_shape
from xpuc.tune_db import TuneDb
from xpuc.tuning import device_programs, export
from xpuc.tuning.device_programs import compiled
from xpuc.tuning.prefilter import KernelCode, predicted_us, refusal
from xpuc.tuning.tasks import Task

MACHINE = resolve("cuda", "sm_90a")
USAGE = KernelUsage("k", "sm_90a", 40, 0, 0, 0, 0, 0)


def loop(*opcodes: str) -> Sass:
    """A kernel that is one loop of these."""
    body = [Instruction(16 * i, opcode, None) for i, opcode in enumerate(opcodes)]
    return Sass("k", (*body, Instruction(16 * len(body), "BRA", 0)))


LOOP = loop("LDG.E.128", "IDP.4A.S8.S8", "IDP.4A.S8.S8", "FFMA")


def code(sass: Sass | None = LOOP, blocks: int = 2048, warps: int = 4, **usage: int) -> KernelCode:
    return KernelCode(dataclasses.replace(USAGE, **usage), sass, blocks, warps)


IN_USE = [code()]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (code(), ""),
        (code(spill_store_bytes=8, spill_load_bytes=4), "spills 12 bytes"),
        (code(registers=255, warps=16),
         "255 registers and 0 bytes of shared memory leave 0 warps resident"),
        (code(shared_bytes=49153), "49153 bytes of shared memory, a block has 49152"),
        (code(shared_bytes=40000, warps=1),
         "40 registers and 40000 bytes of shared memory leave 5 warps"),
        (code(loop("LDG.E.64", "IDP.4A", "IDP.4A")), "has no LDG.E.128"),
        (code(loop("LDG.E.128", *["IMAD"] * 12, "IDP.4A")),
         "14.0 instructions a product, another has 2.0"),
        (code(None), ""),
    ],
)  # fmt: skip
def test_what_has_no_chance_is_refused(one: KernelCode, why: str) -> None:
    said = refusal([one], IN_USE, fewest=2.0)
    assert said.startswith(why) if why else said == ""


def test_a_grid_that_is_small_need_not_fill_a_multiprocessor() -> None:
    assert refusal([code(blocks=1, warps=1, registers=255)], IN_USE, 2.0) == ""


def test_what_spills_no_more_than_what_is_in_use_stands() -> None:
    spills = [code(spill_store_bytes=8)]
    assert refusal(spills, spills, 2.0) == ""


def test_resident_blocks_are_those_of_the_scarcest() -> None:
    assert code(registers=32, warps=8).resident_blocks == 8  # 64 warps
    assert code(registers=32, warps=1).resident_blocks == 32  # blocks
    assert code(registers=128, warps=4).resident_blocks == 4  # 512 registers' worth of warps
    assert code(registers=65, warps=1).resident_blocks == 28  # 72 registers are given
    assert code(shared_bytes=56 << 10, warps=4).resident_blocks == 4


def test_more_in_flight_is_faster_until_memory_is_as_fast_as_it_is() -> None:
    def us(loads: int, blocks: int = 1320) -> float:
        own = code(loop(*["LDG.E.128"] * loads, "IDP.4A"), blocks, 2, registers=200)
        return predicted_us([own], 100_000_000, 0)

    assert us(1) > us(2) > us(4)
    assert us(64) == pytest.approx(100_000_000 / (0.8 * 4800e3), rel=0.03)
    assert us(64) == pytest.approx(us(128), rel=0.02)
    assert us(64, 1321) > us(64)  # one block more than whole waves
    assert us(2, 66) > us(2)  # half of the multiprocessors


def test_instructions_count_where_they_take_longer() -> None:
    short, long = (code(loop("LDG.E.128", *["IMAD"] * n, "IDP.4A")) for n in (4, 400))
    assert predicted_us([long], 1000, 1 << 30) > 10 * predicted_us([short], 1000, 1 << 30)
    assert predicted_us([], 1000, 1000) == 0


def on_gpu(site: Site) -> Site:
    return site_of(site.facts(), MACHINE.facts, cuda.planes)


def task(site: Site, rows: int) -> Task:
    of = on_gpu(site)
    schedule = next(s for s in cuda.SCHEDULES if s.op == of.op and s.accepts(of))
    return Task(of.facts(), MACHINE.facts, schedule, {"decode": 1}, (rows,))


def kernel(of: Task, **knobs: int) -> list[Any]:
    return launches(of.schedule, of.site, of.schedule.knobs(**knobs))


def test_how_a_kernel_is_launched_is_read_off_it() -> None:
    row = task(sites.linear(1, [("Q4_0", 1000, 256)]), 1)
    assert launch_shape(kernel(row, warps=8, rows=1)[0].kernel, 1) == (125, 8)
    many = on_gpu(sites.linear("n", [("Q4_0", 1000, 256)]))
    tiles = next(s for s in cuda.SCHEDULES if s.name == "matmul")
    (launch,) = launches(tiles, many, tiles.knobs())
    assert launch_shape(launch.kernel, 128) == (16 * 2, 4)
    first = next(s for s in cuda.SCHEDULES if s.op == many.op and s.accepts(many))
    for launch in launches(first, many, first.knobs()):  # by TMA: others come before the threads
        assert min(launch_shape(launch.kernel, 128)) > 0


@pytest.mark.slow
def test_code_of_two_candidates_as_ptxas_and_the_disassembler_see_it() -> None:
    of = task(sites.linear(1, [("Q4_0", 64, 4096)]), 1)
    made = [kernel(of, rows=1), kernel(of, rows=2, ahead=4)]
    first, second = compiled(made, "sm_90a", 1)
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    for (each,), blocks in ((first, 16), (second, 8)):
        assert (each.blocks, each.warps) == (blocks, 4)
        assert each.usage.registers > 16
        assert each.sass is not None
        assert each.sass.count("IDP.4A") > 0
        assert each.instructions is not None
        assert 1 < each.instructions < 20
    assert first[0].sass is not None
    assert second[0].sass is not None
    assert second[0].sass.loaded_bytes() > first[0].sass.loaded_bytes()


class Picky:
    """A compiler that does not take the first candidate's kernels."""

    name = "picky"

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        if "_c0_kernel" in source:
            raise XpucError("does not compile", "no")
        return Fatbin(b"", (), source)


def test_a_kernel_that_cannot_be_compiled_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_programs, "find_compiler", Picky)
    of = task(sites.linear(1, [("Q4_0", 64, 64)]), 1)
    assert compiled([kernel(of), kernel(of, rows=1)], "sm_90a", 1) == ["does not compile", ()]


@pytest.mark.slow
def test_a_shortlist_has_what_is_in_use_and_the_best_of_the_rest() -> None:
    of = task(sites.gate_up(1, [("Q4_0", 32, 64)] * 2), 1)
    space = {"warps": (4, 16), "rows": (2, 4)}
    few = dataclasses.replace(of, schedule=dataclasses.replace(of.schedule, space=lambda _: space))
    found = export.shortlist(few, TuneDb(), most=1)
    assert [t.knobs for t in found.tried if "do not divide 32 rows" in t.refused] == [
        {"warps": 16, "rows": 4, "ahead": 1}
    ]
    in_use, other = found.kept
    assert in_use.knobs == {"warps": 4, "rows": 2, "ahead": 1}
    assert other.us == min(t.us for t in found.tried if not t.refused and t is not in_use)


def test_of_what_the_model_cannot_tell_apart_those_that_differ_are_timed() -> None:
    def tried(us: float, **knobs: int) -> export.Tried:
        return export.Tried(knobs, us=us)

    first = [tried(1.0, warps=4, rows=2)]
    others = [
        tried(0.99, warps=4, rows=1),
        tried(1.0, warps=8, rows=1),
        tried(2.0, warps=1, rows=4),
    ]
    picked = export._spread(first, others, 2)
    assert [t.us for t in picked] == [1.0, 0.99]
    assert len(export._spread(first, others, 9)) == 3
