"""Anything at once: several answers, shared prefixes, cancels, faults, a small pool, a store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_model import MODES, PIPELINED, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.extents import place_bytes
from xpuc.runtime.modes import Modes
from xpuc.runtime.policies import POLICIES, PolicyName
from xpuc.runtime.prefix_store import open_store
from xpuc.runtime.speculation import Speculation

pytest.importorskip("lmdb")

TEXT = [n * 7 % 96 for n in range(40)]


class Ask(NamedTuple):
    """A prompt of `n_shared` tokens of the text and `n_own` of its own."""

    n_shared: int
    n_own: int
    n: int
    max_tokens: int
    is_greedy: bool
    waits: int  # steps before the next one comes
    is_cancelled: bool
    is_narrow: bool  # of two tokens, so that drafts are right now and then

    def prompt(self, place: int) -> list[int]:
        return TEXT[: self.n_shared] + [(place * 31 + i) % 96 for i in range(self.n_own)]

    def options(self, place: int) -> dict[str, Any]:
        return {
            "seed": 10 * place,
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if self.is_greedy else 1.0,
            "logit_bias": {3: 40.0, 8: 40.0} if self.is_narrow else {},
        }


asks = st.builds(
    Ask, st.integers(0, 30), st.integers(1, 12), st.integers(1, 5), st.integers(1, 12),
    st.booleans(), st.integers(0, 4), st.sampled_from([False, False, False, True]),
    st.booleans(),
)  # fmt: skip


def serve(engine: Engine, mix: list[Ask]) -> list[dict[int, Result]]:
    """The results of each request, by index."""
    results: dict[int, dict[int, Result]] = {}

    def step() -> None:
        for event in engine.step():
            assert event.index not in results[event.request.id], "it had ended"
            if event.result is not None:
                results[event.request.id][event.index] = event.result

    for place, ask in enumerate(mix):
        request = engine.add_request(ask.prompt(place), n=ask.n, **ask.options(place))
        results[request.id] = {}
        for _ in range(ask.waits):
            step()
        if ask.is_cancelled:
            engine.cancel(request)
    n_steps = 0
    while engine.has_work:
        step()
        n_steps += 1
        assert n_steps < 3000, "it does not end"
    return list(results.values())


def check(
    mix: list[Ask], results: list[dict[int, Result]], fault: int, windows: tuple[int, ...]
) -> None:
    for place, (ask, found) in enumerate(zip(mix, results, strict=True)):
        assert set(found) == set(range(ask.n))
        for index, result in found.items():
            options = ask.options(place)
            options["seed"] += index
            engine = Engine(FakeModel(n_blocks=24, windows=windows))
            whole = engine.generate(ask.prompt(place), **options).ids
            if result.finish_reason in ("cancelled", "error"):
                assert ask.is_cancelled or fault >= 0
                assert result.ids == whole[: len(result.ids)]
            else:
                assert result.ids == whole


@pytest.mark.slow
@given(
    st.lists(asks, min_size=1, max_size=5),
    st.integers(14, 30),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from(list(POLICIES)),
    st.sampled_from([0, 3, 100]),
    st.integers(-1, 12),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([(0,), (0, 6), (5,)]),
    st.sampled_from([MODES, PIPELINED]),
)
@settings(max_examples=40, deadline=None)
def test_every_answer_is_that_of_a_request_alone(
    mix: list[Ask],
    n_blocks: int,
    max_chunk: int,
    max_batch: int,
    policy: PolicyName,
    n_places: int,
    fault: int,
    draft_max: int,
    windows: tuple[int, ...],
    modes: Modes,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2 if n_places else 1):  # the second finds what the first kept
            model = FakeModel(
                n_blocks=(n_blocks, 9)[: len(windows)],
                windows=windows,
                max_chunk=max_chunk,
                max_batch=max_batch,
                modes=modes,
            )
            model.fails_at = {fault}
            store = None
            if n_places:
                n_bytes = n_places * sum(place_bytes(each.block_bytes) for each in model.kv)
                store = open_store(Path(folder), model.kv, b"a model", n_bytes)
            with Engine(
                model, store=store, identity=b"a model", policy=policy,
                speculation=Speculation(draft_max, 1, 3),
            ) as engine:  # fmt: skip
                check(mix, serve(engine, mix), fault, windows)
                assert engine.kv.n_used == 0
                assert not engine.scheduler.has_work
                engine.kv.check()
