"""Which schedule a site gets, and what the tune database knows it by."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
from tvm import relax, tirx

from xpuc.ir import ops
from xpuc.schedules import (
    Schedule,
    Site,
    TargetFacts,
    Weight,
    kernel_digest,
    launches,
    llvm,
    pick,
    site_of,
    tvm_version,
)
from xpuc.schedules.llvm.products import LinearKnobs
from xpuc.tune_db import Measurement, Record, TuneDb

FACTS = TargetFacts("llvm", "znver3", frozenset({"avx2", "fma"}))


def site(op: str, *shapes: tuple[Any, ...], weights: tuple[Weight, ...] = ()) -> Site:
    operands = tuple(relax.Var("x", ops.tensor(shape)) for shape in shapes)
    return Site(op, {}, 1, operands, weights, None, FACTS, 16, "float16")


def schedule(name: str, op: str, accepts: bool = True, invariant: bool = True) -> Schedule:
    return Schedule(
        name, op, lambda _: accepts, lambda *_: None, NoKnobsHere, batch_invariant=invariant
    )


@dataclass(frozen=True)
class NoKnobsHere:
    pass


def linear_site(rows: int = 32) -> Site:
    planes = (
        relax.Var(p.name, ops.tensor((p.size,), p.dtype)) for p in llvm.planes("Q4_0", rows, 64)
    )
    x = ops.q8a(1, 64)
    return Site(
        "linear", {"format": "Q4_0", "rows": rows}, 1,
        tuple(relax.Var("x", t) for t in x.fields), (Weight("Q4_0", rows, 64, tuple(planes)),),
        ops.tensor((1, rows)), FACTS, 16, "float16",
    )  # fmt: skip


def linear_schedule() -> Schedule:
    return next(s for s in llvm.SCHEDULES if s.op == "linear")


def record(where: Site, knobs: dict[str, int], **changes: Any) -> Record:
    made = linear_schedule().knobs_of({k: v for k, v in knobs.items() if k != "unknown"})
    fields: dict[str, Any] = {
        "kernel": changes.get("kernel") or kernel_digest(linear_schedule(), where, made),
        "tvm": tvm_version(),
        "features": ("avx2",), "threads": 2, "error": 0.0, "date": "2026-11-30",
        "measured": (Measurement(1, 1.0, 0.0, 2.0, "memory", 0.5),),
    }  # fmt: skip
    return Record(key=where.key, schedule="linear_x8", knobs=knobs, **fields | changes)


def picked(where: Site, *records: Record) -> tuple[Any, TuneDb]:
    db = TuneDb()
    for each in records:
        db.add(each)
    choice = pick(where, llvm.SCHEDULES, db, deterministic=False)
    assert choice is not None
    return choice, db


def test_sites_of_other_shapes_have_other_keys() -> None:
    n = tirx.Var("n", "int64")
    add = [site("add", (n, 576), (n, 576)), site("add", (n, 576), (576,))]
    norm = [site("block_norm", (n, d), (d,)) for d in (576, 1536)]
    assert len({s.key for s in add + norm}) == 4


def test_a_site_on_weights_is_known_by_them_and_its_activation() -> None:
    assert linear_site().key.shape == "Q4_0:32x64"
    exact = dataclasses.replace(linear_site(), operands=(relax.Var("x", ops.tensor((1, 64))),))
    assert exact.key.shape == "Q4_0:32x64,f32"


def test_the_first_that_accepts_wins() -> None:
    rows = [schedule("no", "add", accepts=False), schedule("a", "add"), schedule("b", "add")]
    choice = pick(site("add", (1, 8), (1, 8)), rows, TuneDb(), deterministic=False)
    assert choice is not None
    assert (choice.schedule.name, choice.origin) == ("a", "default")
    assert choice.reason == "nothing to tune"
    assert pick(site("mul", (1, 8)), rows, TuneDb(), deterministic=False) is None


def test_deterministic_takes_only_batch_invariant_schedules() -> None:
    rows = [schedule("fast", "add", invariant=False), schedule("steady", "add")]
    where = site("add", (1, 8), (1, 8))
    chosen = {d: pick(where, rows, TuneDb(), deterministic=d) for d in (False, True)}
    assert {d: c.schedule.name for d, c in chosen.items() if c} == {False: "fast", True: "steady"}


def test_a_record_of_the_site_gives_its_knobs() -> None:
    where = linear_site()
    choice, db = picked(where, record(where, {"prefetch_bytes": 64}))
    assert (choice.knobs, choice.origin) == (LinearKnobs(prefetch_bytes=64), "tuned")
    assert choice.reason == "record of 2026-11-30"
    assert not db.ignored


@pytest.mark.parametrize(
    ("knobs", "changes", "why"),
    [
        ({}, {"tvm": "0.1"}, "measured with tvm 0.1"),
        ({}, {"features": ("avx512f",)}, "measured with CPU features this target lacks"),
        ({"unknown": 3}, {}, "its knobs are not those of this version"),
        ({}, {"kernel": "c0ffee"}, "measured on another version of the kernel"),
        ({"unroll": 0}, {"kernel": "c0ffee"}, "its knobs make no kernel in this version"),
    ],
)
def test_a_record_that_does_not_fit_is_counted_and_the_default_runs(
    knobs: dict[str, int], changes: dict[str, Any], why: str
) -> None:
    where = linear_site()
    choice, db = picked(where, record(where, knobs, **changes))
    assert (choice.knobs, choice.origin) == (LinearKnobs(), "default")
    assert choice.reason == f"record left out: {why}"
    assert db.ignored == {why: 1}


def test_a_site_is_made_again_from_its_facts() -> None:
    where = linear_site()
    again = site_of(json.loads(json.dumps(where.facts())), FACTS, llvm.planes)
    assert again.key == where.key
    assert again.facts() == where.facts()
    made = [kernel_digest(linear_schedule(), s, LinearKnobs()) for s in (where, again)]
    assert made[0] == made[1]


def test_sites_of_two_groups_of_layers_are_one() -> None:
    first, second = (
        dataclasses.replace(
            site("qk_prep", (tirx.Var(name, "int64"), 2, 8)), result=ops.tensor((1, 8))
        )
        for name in ("blocks", "blocks.1")
    )
    assert first.facts() == second.facts()
    other = dataclasses.replace(
        site("qk_prep", (tirx.Var("n", "int64"), 2, 8)), result=first.result
    )
    assert other.facts() != first.facts()


def test_the_digest_tells_kernels_apart() -> None:
    many = [(linear_site(), LinearKnobs()), (linear_site(), LinearKnobs(prefetch_bytes=0)),
            (linear_site(40), LinearKnobs())]  # fmt: skip
    digests = [kernel_digest(linear_schedule(), s, k) for s, k in many]
    assert len(set(digests)) == 3
    # Without tiles to cut, their size makes no other kernel.
    assert kernel_digest(linear_schedule(), linear_site(), LinearKnobs(m_tile=8)) == digests[0]


def test_launches_have_their_operands_in_order() -> None:
    where = linear_site()
    (launch,) = launches(linear_schedule(), where, LinearKnobs())
    assert launch.name == "linear_q4_0_32x64_r1"
    assert launch.inputs == (*where.operands, *where.weights[0].planes)
    assert [str(v.ty.dtype) for v in launch.outputs] == ["float32"]
