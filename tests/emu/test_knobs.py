"""Every value of every knob that a tuning session may try gives the bits of the defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sites
from emu.device import MACHINE, InOut, Out, build, run

from xpuc.schedules import Schedule, Site, launches, site_of
from xpuc.schedules import cuda as target
from xpuc.schedules.operands import outputs_of
from xpuc.tuning import reference
from xpuc.tuning.cases import make

TURN = 32 * 32  # columns that a warp takes at a time
SITES = {
    "linear_group, 2 rows": sites.linear(
        2, [("Q8_0", 9, 4 * TURN + 160), ("Q4_1", 5, 4 * TURN + 160)]
    ),
    "gate_up": sites.gate_up(1, [("Q4_0", 32, 2 * TURN)] * 2),
    "head": sites.head_argmax(1, ("Q4_0", 100, 2 * TURN + 32)),
    "decode": sites.attention(2, (8, 2, 64), window=40, quantize=True),
    "decode, 3 queries a head, idle lanes": sites.attention(1, (6, 2, 96), "q8_0", softcap=3.0),
    "flash": sites.attention("n", (4, 2, 64), window=70),
    "gated_matmul": sites.gate_up("n", [("Q4_0", 40, 64)] * 2, quantize=False),
}


def on_gpu(where: Site) -> Site:
    """As on several architectures: without products of warpgroups (test_matmul_hopper.py)."""
    features = MACHINE.facts.features - {"wgmma"}
    return site_of(where.facts(), replace(MACHINE.facts, features=features), target.planes)


def values_in_turn(schedule: Schedule, site: Site) -> list[Any]:
    """The defaults, then each knob's values with the other knobs as they are, where they fit.

    Of attention the last of all at once, too; of a product that is a tile too large for a block.
    """
    defaults, made = schedule.knobs(), [schedule.knobs()]
    space = schedule.space(site)
    changes = [{name: value} for name, values in space.items() for value in values]
    if site.op == "attention":
        changes.append({name: values[-1] for name, values in space.items()})
    for change in changes:
        try:
            knobs = type(defaults)(**(vars(defaults) | change))
            launches(schedule, site, knobs)
        except AssertionError:
            continue
        if knobs not in made:
            made.append(knobs)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("where", SITES.values(), ids=SITES)
def test_no_knob_changes_a_bit(where: Site) -> None:
    site = on_gpu(where)
    schedule = next(s for s in target.SCHEDULES if s.op == site.op and s.accepts(site))
    case = make(site, site.n or 9, depth=150)  # of attention: more than a segment
    programs = [launches(schedule, site, knobs) for knobs in values_in_turn(schedule, site)]
    assert len(programs) > 4
    variables = [*site.operands, *(p for w in site.weights for p in w.planes)]
    arrays = dict(
        zip(variables, [*case.operands, *(p for w in case.planes for p in w)], strict=True)
    )
    named = {
        (i, j): launch.kernel.with_attr("global_symbol", f"{launch.name}_{i}")
        for i, program in enumerate(programs)
        for j, launch in enumerate(program)
    }
    built = build(*named.values())
    first = None
    for i, program in enumerate(programs):
        known: dict[Any, Any] = dict(arrays)
        for launch in program:
            zeros = {v: InOut(np.zeros(*shape(v, case.symbols))) for v in launch.zeros}
            written = run(built[f"{launch.name}_{i}"], *((known | zeros)[v] for v in launch.inputs),
                          *(Out(*shape(v, case.symbols)) for v in launch.outputs))  # fmt: skip
            assert not any(again.any() for again in written[: len(zeros)])
            known.update(zip(launch.outputs, written[len(zeros) :], strict=True))
        found = [known[v] for v in program[-1].outputs[-len(outputs_of(site.result)) :]]
        first = first or found
        for got, want in zip(found, first, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert first is not None
    assert reference.error(site, case, first) < schedule.tolerance


def shape(var: Any, symbols: dict[str, int]) -> tuple[tuple[int, ...], str]:
    """Its shape and dtype."""
    sizes = tuple(symbols[d.name] if hasattr(d, "name") else int(d) for d in var.ty.shape)
    return sizes, str(var.ty.dtype)
