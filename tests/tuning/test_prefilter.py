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
from xpuc.schedules.cuda.grid import argument_bytes, grid_of
from xpuc.tune_db import TuneDb
from xpuc.tuning import cases, device_programs, export
from xpuc.tuning.device_programs import compiled
from xpuc.tuning.prefilter import (
    KernelCode,
    fewest_cycles,
    predicted_us,
    product_of,
    refusal,
)
from xpuc.tuning.tasks import Task

MACHINE = resolve("cuda", "sm_90a")
USAGE = KernelUsage("k", "sm_90a", 40, 0, 0, 0, 0, 0)


def loop(*opcodes: str) -> Sass:
    """A kernel that is one loop of these."""
    body = [Instruction(16 * i, opcode, None) for i, opcode in enumerate(opcodes)]
    return Sass("k", (*body, Instruction(16 * len(body), "BRA", 0)))


LOOP = loop("LDG.E.128", "IDP.4A.S8.S8", "IDP.4A.S8.S8", "FFMA")


def code(
    sass: Sass | None = LOOP, blocks: int = 2048, warps: int = 4, asked: int = 0, n_bytes: int = 0,
    **usage: int,
) -> KernelCode:  # fmt: skip
    return KernelCode(dataclasses.replace(USAGE, **usage), sass, blocks, warps, asked, n_bytes)


IN_USE = [code()]
FEWEST = fewest_cycles([IN_USE])
PREPARES = code(loop("LDG.E.64", "FFMA", "STG.E.64"), blocks=64, n_bytes=1 << 20)


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
         "7.0 times the cycles of another for a product"),
        (code(asked=227 << 10, warps=8), ""),
        (code(asked=(227 << 10) + 1, warps=8), "232449 bytes of shared memory, a block has 232448"),
        (code(None), ""),
    ],
)  # fmt: skip
def test_what_has_no_chance_is_refused(one: KernelCode, why: str) -> None:
    said = refusal([one], IN_USE, FEWEST)
    assert said.startswith(why) if why else said == ""


def test_a_grid_that_is_small_need_not_fill_a_multiprocessor() -> None:
    assert refusal([code(blocks=1, warps=1, registers=255)], IN_USE, FEWEST) == ""


def test_what_spills_no_more_than_what_is_in_use_stands() -> None:
    spills = [code(spill_store_bytes=8)]
    assert refusal(spills, spills, FEWEST) == ""


def test_every_launch_has_to_stand() -> None:
    beside = [PREPARES, *IN_USE]
    assert refusal([PREPARES, code()], beside, FEWEST) == ""
    few = code(registers=255, warps=16)
    for made in ([few, code()], [PREPARES, few]):
        assert refusal(made, beside, FEWEST).startswith("255 registers")
    slow = code(loop("LDG.E.128", *["IMAD"] * 12, "IDP.4A"))
    assert refusal([PREPARES, slow], beside, FEWEST).startswith("7.0 times")


def test_instructions_are_those_of_what_multiplies() -> None:
    """The sums of a dp4a are scaled by FFMA, and those before it may be anything."""
    assert product_of([PREPARES, code(), PREPARES]) == code()
    assert product_of([code(None), PREPARES]) is None
    assert fewest_cycles([[PREPARES, code()], [code(loop("IDP.4A"))]]) == 1 / 4
    assert fewest_cycles([[code(None)], []]) == 0


@pytest.mark.parametrize(
    ("opcode", "multiply_adds"),
    [("IDP.4A.S8.S8", 4), ("HMMA.1688.F32", 32), ("HMMA.16816.F32", 64),
     ("IMMA.16832.S8.S8", 128), ("HGMMA.64x128x16.F32", 1024)],
)  # fmt: skip
def test_products_count_what_they_multiply(opcode: str, multiply_adds: int) -> None:
    assert code(loop("LDG.E.128", opcode)).instructions == 2 / multiply_adds


def test_resident_blocks_are_those_of_the_scarcest() -> None:
    assert code(registers=32, warps=8).resident_blocks == 8  # 64 warps
    assert code(registers=32, warps=1).resident_blocks == 32  # blocks
    assert code(registers=128, warps=4).resident_blocks == 4  # 512 registers' worth of warps
    assert code(registers=65, warps=1).resident_blocks == 28  # 72 registers are given
    assert code(shared_bytes=56 << 10, warps=4).resident_blocks == 4
    assert code(shared_bytes=56, asked=128 << 10, warps=4).resident_blocks == 1


def test_more_in_flight_is_faster_until_memory_is_as_fast_as_it_is() -> None:
    def us(loads: int, blocks: int = 1320) -> float:
        sass = loop(*["LDG.E.128"] * loads, "IDP.4A")
        return predicted_us([code(sass, blocks, 2, n_bytes=100_000_000, registers=200)], 0)

    assert us(1) > us(2) > us(4)
    assert us(64) == pytest.approx(100_000_000 / (0.8 * 4800e3), rel=0.03)
    assert us(64) == pytest.approx(us(128), rel=0.02)
    assert us(64, 1321) > us(64)  # one block more than whole waves
    assert us(2, 66) > us(2)  # half of the multiprocessors


def test_instructions_count_where_they_take_longer() -> None:
    short, long = (code(loop("LDG.E.128", *["IMAD"] * n, "IDP.4A")) for n in (4, 400))
    assert predicted_us([long], 1 << 30) > 10 * predicted_us([short], 1 << 30)
    assert predicted_us([], 1000) == 0


def test_the_loop_of_the_products_may_hold_one_that_fetches_for_them() -> None:
    opcodes = ("LDG.E.128", "STS.128", "BRA", "HMMA.16816.F32", "IMAD")
    body = [Instruction(16 * i, o, 0 if o == "BRA" else None) for i, o in enumerate(opcodes)]
    kernel = code(Sass("k", (*body, Instruction(80, "BRA", 0))))
    assert kernel.multiplies_by == "HMMA"
    assert kernel.instructions == 4 / 64


def test_tensor_cores_are_no_faster_than_they_are() -> None:
    whole_wave = 132 * code().resident_blocks
    long, short = (
        code(loop(*["IMAD"] * n, "HGMMA.64x128x16.F32"), blocks=whole_wave) for n in (300, 30)
    )
    least = (1 << 40) / 2 / (132 * 4 * 32 * 16 * 1.98e3)
    assert predicted_us([short], 1 << 40) == pytest.approx(least)
    assert predicted_us([long], 1 << 40) > 4 * least
    half = code(loop("HGMMA.64x128x16.F32"), blocks=66)
    assert predicted_us([half], 1 << 40) == pytest.approx(2 * least)


def test_what_is_predicted_is_all_launches() -> None:
    """Those that prepare take what their own tensors take, and what multiplies all products."""
    product = code(loop("LDG.E.128", *["IMAD"] * 40, "IDP.4A"))
    before, after = (predicted_us([each], 0) for each in (PREPARES, code(None, n_bytes=1 << 24)))
    assert min(before, after) > 0
    whole = predicted_us([PREPARES, product, code(None, n_bytes=1 << 24)], 1 << 30)
    assert whole == pytest.approx(before + predicted_us([product], 1 << 30) + after)
    other = code(loop("LDG.E.128", *["IMAD"] * 80, "IDP.4A"))
    assert predicted_us([PREPARES, other], 1 << 30) > predicted_us([PREPARES, product], 1 << 30)


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
    grid = grid_of(kernel(row, warps=8, rows=1)[0], {})
    assert (grid.blocks, grid.warps, grid.shared_bytes) == (125, 8, 0)
    many = on_gpu(sites.linear("n", [("Q4_0", 1000, 256)]))
    tiles = next(s for s in cuda.SCHEDULES if s.name == "matmul")
    (launch,) = launches(tiles, many, tiles.knobs())
    grid = grid_of(launch, {"n": 128})
    assert (grid.blocks, grid.warps) == (16 * 2, 4)
    q8a = 8 * 128 * (32 + 8 + 8 + 4)
    assert argument_bytes(launch, {"n": 128}) == q8a + 1000 * 8 * 18 + 4 * 128 * 1000
    first = next(s for s in cuda.SCHEDULES if s.op == many.op and s.accepts(many))
    prepares, product = launches(first, many, first.knobs())
    assert grid_of(prepares, {"n": 128}).shared_bytes == 0
    grid = grid_of(product, {"n": 129})  # by TMA: others come before the threads
    assert (grid.blocks, grid.warps) == (8 * 2, 8)
    assert grid.shared_bytes > 4 * 128 * 128 * 2


def test_what_is_known_only_at_a_launch_is_that_of_the_case() -> None:
    of = on_gpu(sites.attention(3))
    schedule = next(s for s in cuda.SCHEDULES if s.op == of.op and s.accepts(of))
    (launch,) = launches(schedule, of, schedule.knobs())
    symbols = cases.symbols(of, 3, depth=300)
    assert symbols == cases.make(of, 3, depth=300).symbols
    assert grid_of(launch, symbols).blocks == 2 * 3 * 3  # heads of the pool, rows, segments


@pytest.mark.slow
def test_code_of_two_candidates_as_ptxas_and_the_disassembler_see_it() -> None:
    of = task(sites.linear(1, [("Q4_0", 64, 4096)]), 1)
    made = [kernel(of, rows=1), kernel(of, rows=2, ahead=4)]
    first, second = compiled(made, "sm_90a", {})
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    for (each,), blocks in ((first, 16), (second, 8)):
        assert (each.blocks, each.warps) == (blocks, 4)
        assert each.usage.registers > 16
        assert each.sass is not None
        assert each.sass.count("IDP.4A") > 0
        assert 0.25 < each.instructions < 5
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
    assert compiled([kernel(of), kernel(of, rows=1)], "sm_90a", {}) == ["does not compile", ()]


@pytest.mark.slow
def test_code_of_a_product_that_has_to_be_prepared() -> None:
    of = task(sites.linear("n", [("Q4_0", 256, 1024)]), 512)
    small, large = compiled([kernel(of, rows=64), kernel(of)], "sm_90a", {"n": 512})
    assert not isinstance(small, str)
    assert not isinstance(large, str)
    for code in (small, large):
        assert [each.multiplies_by for each in code] == [None, "HGMMA"]
        assert product_of(code) is code[1]
    # A decoded weight is multiplied with twice as many rows.
    assert small[1].instructions > 1.5 * large[1].instructions
    assert large[1].cycles >= 1 / 16
    assert refusal(small, large, fewest_cycles([small, large])).endswith("for a product")
    assert refusal(large, small, fewest_cycles([small, large])) == ""


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
