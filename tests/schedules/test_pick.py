"""Which schedule a site gets, and what the tune database knows it by."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from xpuc.ir import ops
from xpuc.schedules import Schedule, Site, TargetFacts, Weight, pick
from xpuc.tune_db import Record, TuneDb


def site(op: str, *shapes: tuple[Any, ...], weights: tuple[Weight, ...] = ()) -> Site:
    operands = tuple(relax.Var("x", ops.tensor(shape)) for shape in shapes)
    facts = TargetFacts("llvm", "znver3", frozenset())
    return Site(op, {}, 1, operands, weights, None, facts, 16, "float16")


def schedule(name: str, op: str, accepts: bool = True, invariant: bool = True) -> Schedule:
    return Schedule(name, op, lambda _: accepts, lambda *_: None, invariant)


def test_sites_of_other_shapes_have_other_keys() -> None:
    n = tirx.Var("n", "int64")
    add = [site("add", (n, 576), (n, 576)), site("add", (n, 576), (576,))]
    norm = [site("block_norm", (n, d), (d,)) for d in (576, 1536)]
    assert len({s.key for s in add + norm}) == 4


def test_the_first_that_accepts_wins() -> None:
    rows = [schedule("no", "add", accepts=False), schedule("a", "add"), schedule("b", "add")]
    choice = pick(site("add", (1, 8), (1, 8)), rows, TuneDb(), deterministic=False)
    assert choice is not None
    assert (choice.schedule.name, choice.origin) == ("a", "default")
    assert pick(site("mul", (1, 8)), rows, TuneDb(), deterministic=False) is None


def test_deterministic_takes_only_batch_invariant_schedules() -> None:
    rows = [schedule("fast", "add", invariant=False), schedule("steady", "add")]
    where = site("add", (1, 8), (1, 8))
    names = {d: pick(where, rows, TuneDb(), deterministic=d).schedule.name for d in (False, True)}
    assert names == {False: "fast", True: "steady"}


def test_a_record_of_the_site_gives_its_knobs() -> None:
    where = site("linear", (1, 64), weights=(Weight("Q4_0", 32, 64, ()),))
    db = TuneDb({(where.key, "x8"): Record(where.key, "x8", {"m_tile": 32})})
    choice = pick(where, [schedule("x8", "linear")], db, deterministic=False)
    assert choice is not None
    assert (choice.knobs, choice.origin) == ({"m_tile": 32}, "tuned")
