"""The decode loop of a GPU: graphs and steps queued ahead give the very answers of plain calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emu import fake_driver
from stepping import Stepper

import xpuc
from xpuc.codegen.compile import Options, compile_model
from xpuc.runtime.engine import Engine
from xpuc.runtime.model import Model, load_model

IDS = [list(np.random.default_rng(n).integers(1, 280, 150).tolist()) for n in range(2)]
DEPTH = 118  # from which on a segment's border is crossed at 128


@pytest.fixture(scope="module")
def artifact(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    emulated_compiler: None,
) -> Path:
    """A tiny model with code for the emulated GPU."""
    return compile_model(
        tiny_model("llama", weights="Q4_0"), "cuda -arch=sm_90a",
        tmp_path_factory.mktemp("decode_loop") / "m.xpuc",
        options=Options(ctx=512, max_batch=2, max_chunk=64),
    ).path  # fmt: skip


def read(model: Model, n_texts: int, tail: Any) -> list[Any]:
    """What follows each token from DEPTH on, by decode calls after a prompt."""
    stepper = Stepper(model, IDS[:n_texts], tail=tail)
    for start in range(0, DEPTH, 32):
        stepper.step({i: min(32, DEPTH - start) for i in range(n_texts)})
    while list(stepper.left()):
        stepper.step(dict.fromkeys(range(n_texts), 1))
    return [rows[DEPTH:] for rows in stepper.logits]


@pytest.mark.parametrize("n_texts", [1, 2])
def test_graphs_give_the_bits_of_plain_calls(artifact: Path, n_texts: int) -> None:
    """Logits, which say more than ids, across the border of a segment."""
    plain, replayed = (load_model(artifact, graphs=graphs) for graphs in (False, True))
    before = fake_driver.graph_launches()
    expected = read(plain, n_texts, "logits")
    assert fake_driver.graph_launches() == before
    found = read(replayed, n_texts, "logits")
    # All but the first call, which is plain; one in two segments or four has a graph of its own.
    assert fake_driver.graph_launches() == before + len(IDS[0]) - DEPTH - 1
    assert replayed.modes.graphs.is_on
    for rows, wanted in zip(found, expected, strict=True):
        assert rows.tobytes() == wanted.tobytes()


PROMPTS = [ids[:n] for ids, n in zip(IDS, (12, 21), strict=True)]


def ids_of(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [result.ids for result in engine.generate(prompts, temperature=0, **options)]


@pytest.fixture(scope="module")
def plain(artifact: Path) -> Iterator[Engine]:
    """Nothing is queued ahead, nothing replayed."""
    with xpuc.load(artifact, pipeline=False, graphs=False) as engine:
        engine.tokenizer.eog_ids = frozenset()  # so that none ends before its time
        yield engine


@pytest.fixture(params=[True, False], ids=["graphs", "launches"])
def pipelined(artifact: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with xpuc.load(artifact, graphs=request.param) as engine:
        engine.tokenizer.eog_ids = frozenset()
        assert engine.modes.pipelined.is_on
        yield engine


@pytest.mark.parametrize("n", [1, 2])
def test_steps_queued_ahead_give_the_ids_of_plain_ones(
    plain: Engine, pipelined: Engine, n: int
) -> None:
    found = ids_of(pipelined, PROMPTS[:n], max_tokens=18)
    assert found == ids_of(plain, PROMPTS[:n], max_tokens=18)
    assert pipelined.scheduler.counters.sums["n_ahead"] == 16


def test_ends_newcomers_and_cancels_change_no_other_ids(plain: Engine, pipelined: Engine) -> None:
    whole = ids_of(plain, PROMPTS, max_tokens=14)
    stop = whole[0][5]
    n_stopped = whole[0].index(stop) + 1
    events: dict[int, list[int]] = {}
    first = pipelined.add_request(PROMPTS[0], temperature=0, max_tokens=14, stop_ids=[stop])
    for _ in range(3):
        collect(pipelined, events)
    second = pipelined.add_request(PROMPTS[1], temperature=0, max_tokens=14)
    while first.id in pipelined._live:
        collect(pipelined, events)
    third = pipelined.add_request(PROMPTS[0], temperature=0, max_tokens=14)
    for _ in range(4):
        collect(pipelined, events)
    pipelined.cancel(third)
    while pipelined.has_work:
        collect(pipelined, events)
    assert events[first.id] == whole[0][:n_stopped]
    assert events[second.id] == whole[1]
    assert events[third.id] == whole[0][: len(events[third.id])]
    assert pipelined.scheduler.counters.sums["n_dropped"] > 0
    assert pipelined.kv.n_used == 0


def collect(engine: Engine, events: dict[int, list[int]]) -> None:
    for event in engine.step():
        if event.chunk.id is not None:
            events.setdefault(event.request.id, []).append(event.chunk.id)
