"""How a model may be decoded, why not otherwise, and what the engine does then."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest
from cli_runs import manifest as manifest_of
from fake_model import MODES, FakeModel

from xpuc.artifact import EntryPoint, Manifest
from xpuc.errors import RequestError
from xpuc.runtime.engine import Engine
from xpuc.runtime.modes import Mode, modes_of
from xpuc.runtime.policies import PolicyName
from xpuc.runtime.speculation import Speculation

SINGLY = dataclasses.replace(MODES, batched=Mode("batched", False, "a test"))
PROMPTS = [[n, n + 1, n + 2] for n in range(1, 9, 2)]
PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def manifest(*operations: dict[str, Any], rows: tuple[int, ...] = (1, 4)) -> Manifest:
    entries = tuple(EntryPoint(f"rows_{n}", "decode", n, "logits") for n in rows)
    return manifest_of(
        entry_points=(*entries, EntryPoint("prefill", "prefill", 0, "logits")),
        decisions={"operations": list(operations)},
    )


def operation(
    origin: str, entry: str, *, op: str = "linear", has_weights: bool = True
) -> dict[str, Any]:
    weights = [["Q5_1", 64, 256]] if has_weights else []
    name = "linear Q5_1:64x256 rows=4"
    return {"name": name, "op": op, "weights": weights, "origin": origin, "uses": {entry: 3}}


def test_schedules_for_several_rows_make_batches() -> None:
    found = modes_of(
        manifest(
            operation("default", "rows_4"),
            operation("tuned", "rows_4"),
            operation("portable", "rows_1"),  # of one row, of any number, and without a weight
            operation("portable", "prefill"),
            operation("portable", "rows_4", has_weights=False),
        )
    )
    assert found.batched == Mode("batched", True, "up to 4 rows a step")


def test_a_target_free_kernel_of_several_rows_is_the_refusal() -> None:
    found = modes_of(manifest(operation("default", "rows_4"), operation("portable", "rows_4")))
    reason = "linear Q5_1:64x256 rows=4: no schedule of the target takes several rows of it"
    assert found.batched == Mode("batched", False, reason)


def test_one_row_a_step_is_no_batch() -> None:
    assert not modes_of(manifest(rows=(1,))).batched.is_on


def on_a_gpu(*operations: dict[str, Any]) -> Manifest:
    made = dataclasses.replace(manifest(*operations), target={"kind": "cuda"})
    greedy = EntryPoint("decode_greedy", "decode", 1, "greedy")
    return dataclasses.replace(made, entry_points=(*made.entry_points, greedy))


def test_the_host_has_no_steps_to_queue() -> None:
    found = modes_of(dataclasses.replace(manifest(), target={"kind": "llvm"}))
    for mode in (found.pipelined, found.graphs):
        assert not mode.is_on
        assert mode.reason == "no device: target llvm computes on the host"


def test_a_device_queues_steps_ahead_and_replays_them() -> None:
    found = modes_of(
        on_a_gpu(
            operation("default", "decode_greedy", op="embed"),
            operation("default", "decode_greedy", op="head_argmax"),
            operation("portable", "decode_greedy", op="softcap"),  # neither takes ids nor gives any
            operation("portable", "prefill", op="argmax"),  # of no decode step
        )
    )
    assert found.pipelined.is_on
    assert found.graphs.is_on


@pytest.mark.parametrize("op", ["embed", "argmax", "head_argmax"])
def test_target_free_kernels_of_ids_keep_steps_from_being_queued_ahead(op: str) -> None:
    found = modes_of(on_a_gpu(operation("portable", "decode_greedy", op=op)))
    reason = "linear Q5_1:64x256 rows=4: no schedule of the target"
    assert found.pipelined == Mode("pipelined", False, reason)
    assert found.graphs.is_on


def test_what_a_device_could_do_is_switched_off() -> None:
    found = modes_of(on_a_gpu(), pipeline=False, graphs=False)
    assert found.pipelined == Mode("pipelined", False, "switched off: pipeline=False")
    assert found.graphs == Mode("replayed", False, "switched off: graphs=False")


def test_an_engine_says_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "xpuc"):
        engine = Engine(FakeModel(modes=SINGLY))
    assert engine.modes is SINGLY
    assert [each.getMessage() for each in caplog.records] == [
        "batched decode: off (a test)",
        "pipelined decode: off (a fake)",
        "replayed decode: off (a fake)",
    ]


@pytest.mark.parametrize("policy", ["fcfs", "vllm"])
def test_after_a_refusal_sequences_decode_in_turns(policy: PolicyName) -> None:
    model = FakeModel(modes=SINGLY)
    engine = Engine(model, policy=policy)
    requests = [engine.add_request(prompt, **PARAMS) for prompt in PROMPTS]
    turns, results = [], {}
    while engine.has_work:
        for event in engine.step():
            turns.append(requests.index(event.request))
            if event.result is not None:
                results[turns[-1]] = event.result.ids
    expected = [Engine(FakeModel()).generate(prompt, **PARAMS).ids for prompt in PROMPTS]
    assert [results[n] for n in range(len(PROMPTS))] == expected
    decodes = [rows for kind, rows, _ in model.calls if kind != "prefill"]
    assert set(decodes) == {1}
    everyone = set(range(len(PROMPTS)))
    rounds = [turns[n : n + len(PROMPTS)] for n in range(0, len(turns), len(PROMPTS))]
    assert all(set(each) == everyone for each in rounds), "somebody had two turns in a round"
    assert len({tuple(each) for each in rounds[1:]}) == 1, "the order of turns stays"


def test_one_decodes_beside_a_prompt() -> None:
    model = FakeModel(modes=SINGLY)
    engine = Engine(model)
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, **PARAMS)
    engine.step()
    engine.add_request([*range(1, 41)], **PARAMS)
    engine.step()
    kind, rows, _ = model.calls[-1]
    assert (kind, rows) == ("prefill", model.max_chunk)
    assert engine.scheduler.counters.sums["decode_tokens"] == 1


def test_drafts_are_batches_too() -> None:
    with pytest.raises(RequestError, match="draft_max"):
        Engine(FakeModel(modes=SINGLY), speculation=Speculation(draft_max=3))


@pytest.mark.slow
def test_the_cpu_has_a_schedule_for_every_matrix_of_a_batch(tiny_model: Any) -> None:
    from xpuc.codegen.compile import Options, operations  # imports tvm

    found, rows = operations(tiny_model("llama", weights="Q8_0"), Options(ctx=64, max_batch=2))
    made = dataclasses.replace(
        manifest(*json.loads(json.dumps(found))),
        entry_points=tuple(EntryPoint(name, "decode", n, "logits") for name, n in rows.items()),
    )
    assert modes_of(made).batched == Mode("batched", True, "up to 2 rows a step")
