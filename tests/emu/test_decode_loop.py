"""The decode loop of a GPU: graphs and steps queued ahead give the very answers of plain calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from emu import fake_driver
from emu.device import device
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


PROMPTS = [ids[:n] for ids, n in zip(IDS, (24, 21), strict=True)]
# How prompts are cut, on which bits hang, is not left to how long steps take.
ALIKE = {"chunk_budget_ms": math.inf}
GREEDY = {"temperature": 0}


def ids_of(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [result.ids for result in engine.generate(prompts, **(GREEDY | options))]


@pytest.fixture(scope="module")
def plain(artifact: Path) -> Iterator[Engine]:
    """Nothing is queued ahead, nothing replayed."""
    with xpuc.load(artifact, pipeline=False, graphs=False, **ALIKE) as engine:
        engine.tokenizer.eog_ids = frozenset()  # so that none ends before its time
        yield engine


@pytest.fixture(params=[True, False], ids=["graphs", "launches"])
def pipelined(artifact: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with xpuc.load(artifact, graphs=request.param, **ALIKE) as engine:
        engine.tokenizer.eog_ids = frozenset()
        assert engine.modes.pipelined.is_on
        yield engine


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", [{}, {"seed": 1, "temperature": 1.5}], ids=["greedy", "sampled"])
def test_steps_queued_ahead_give_the_ids_of_plain_ones(
    plain: Engine, pipelined: Engine, how: dict[str, Any], n: int
) -> None:
    expected = ids_of(plain, PROMPTS[:n], max_tokens=18, **how)
    before = fake_driver.graph_launches()
    assert ids_of(pipelined, PROMPTS[:n], max_tokens=18, **how) == expected
    assert pipelined.scheduler.counters.sums["n_ahead"] == 16
    # Of 17 decode steps the first is plain, as it loads the kernels.
    n_graphs = 16 if pipelined.modes.graphs.is_on else 0
    assert fake_driver.graph_launches() == before + n_graphs


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


def test_logits_that_are_no_numbers_end_their_request_alone(
    plain: Engine, pipelined: Engine
) -> None:
    """The step after them, which is queued, embeds the id -1 and is nobody's."""
    whole = ids_of(plain, PROMPTS, max_tokens=12)
    first, second = (
        pipelined.add_request(prompt, temperature=0, max_tokens=12) for prompt in PROMPTS
    )
    events: dict[int, list[int]] = {}
    for _ in range(5):
        collect(pipelined, events)
    sequence = pipelined._live[first.id].sequence
    (pool,) = pipelined.model.kv
    for buffer in pool.buffers(sequence.blocks[0][0]):
        buffer[:] = 0xFF  # NaN in f16
    pool.send(sequence.blocks[0][0])
    results = {}
    while pipelined.has_work:
        for event in pipelined.step():
            if event.chunk.id is not None:
                events[event.request.id].append(event.chunk.id)
            if event.result is not None:
                results[event.request.id] = event.result
    assert results[first.id].finish_reason == "error"
    assert "unfit" in results[first.id].error
    assert results[second.id].ids == whole[1]
    assert pipelined.scheduler.counters.sums["n_dropped"] == 1


def test_a_call_that_cannot_be_captured_is_made_plainly(
    artifact: Path, plain: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with xpuc.load(artifact, **ALIKE) as engine:
        engine.tokenizer.eog_ids = frozenset()
        entries = engine.model._calls.entries
        entry = entries[1, "greedy"]

        def takes_memory(*arguments: Any) -> None:
            entry(*arguments)
            tvm.runtime.empty((1,), "int32", device())  # which a capture forbids

        entries[1, "greedy"] = takes_memory
        before = fake_driver.graph_launches()
        assert ids_of(engine, PROMPTS[:1], max_tokens=8) == ids_of(plain, PROMPTS[:1], max_tokens=8)
        assert fake_driver.graph_launches() == before
        assert not engine.modes.graphs.is_on
        assert engine.modes.graphs.reason.startswith("a capture failed: ")
        assert engine.modes.pipelined.is_on
    assert "CUDA graphs are off" in caplog.text
