"""A model whose prompts may be multiplied with int8 copies, on the emulated GPU: what they answer,
when the copies are made, and what is said of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import invoke

import xpuc
from xpuc.artifact import Manifest, read_manifest
from xpuc.cli import quantities
from xpuc.codegen.compile import Options, compile_model, operations
from xpuc.errors import RequestError
from xpuc.runtime import memory, places

PROMPTS = [list(range(1, 50)), [41]]
# All widths are whole blocks of 256 columns, so that no matrix gets another format.
WIDE = {"weights": "Q4_K", "dim": 256, "heads": 4, "head_dim": 64, "ffn": 256, "layers": 2}
MATRICES = 7 + 3  # of the last layer q, k and v; what follows is of few rows
SIZES = {"ctx": 128, "max_batch": 1, "max_chunk": 32}


@pytest.fixture(scope="module")
def compiled(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    emulated_compiler: None,
) -> Path:
    """An artifact with both kinds of prefill."""
    return compile_model(
        tiny_model("llama", **WIDE), "cuda -arch=sm_90a",
        tmp_path_factory.mktemp("auto") / "m.xpuc",
        options=Options(prefill_weights="auto", **SIZES),
    ).path  # fmt: skip


def wanted(manifest: Manifest) -> int:
    """Free memory that all sequences and the copies take, to the byte."""
    statement = memory.plan(manifest, manifest.max_batch, manifest.context, free=1 << 40)
    assert statement.prefill.copies == manifest.copy_bytes > 0
    return statement.total + memory.RESERVE_BYTES


def answers(artifact: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> tuple[Any, list[Any]]:
    """The memory statement with so many free bytes, and what the prompts give."""
    monkeypatch.setattr(places.Gpu, "free_bytes", lambda self: free)
    with xpuc.load(artifact, chunk_budget_ms=math.inf) as engine:
        results = engine.generate(PROMPTS, max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
        return engine.model.memory, [(r.ids, [p.logprob for p in r.logprobs]) for r in results]


def test_copies_are_made_where_memory_allows_and_answer_as_the_packed_weights(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(compiled)
    assert len(manifest.copies) == MATRICES
    enough = wanted(manifest)
    with_copies, int8 = answers(compiled, monkeypatch, enough)
    without, packed = answers(compiled, monkeypatch, enough - 1)
    assert with_copies.prefill.copies == manifest.copy_bytes
    assert any(line.startswith("int8 copies for prompts") for line in with_copies.lines())
    assert without.prefill.copies == 0
    assert with_copies.total - without.total == manifest.copy_bytes
    assert "are too much" in without.lines()[-1]
    assert int8 != packed, "the copies were not used"
    for (ids, logprobs), (want, expected) in zip(int8, packed, strict=True):
        assert ids == want
        assert logprobs == pytest.approx(expected, abs=0.1)


def test_decoding_never_takes_a_copy(compiled: Path) -> None:
    manifest = read_manifest(compiled)
    taking = {e.name for e in manifest.entry_points if e.copies}
    assert {e.kind for e in manifest.entry_points if e.copies} == {"prefill"}
    assert len(taking) == sum(e.kind == "prefill" for e in manifest.entry_points) / 2
    of_int8 = [o for o in manifest.operations if o["schedule"].startswith("int8_")]
    assert of_int8
    assert all(set(o["uses"]) <= taking for o in of_int8)


def test_the_policy_is_said(compiled: Path) -> None:
    n_bytes = read_manifest(compiled).copy_bytes
    shown = f"auto, {MATRICES} matrices have int8 copies, {quantities.size(n_bytes)}"
    assert shown in invoke("inspect", compiled).out
    explained = invoke("explain", compiled, "--no-measure", "--entry", "prefill_int8")
    assert shown in explained.out
    assert "int8_matmul" in explained.out


def schedules(found: list[dict[str, Any]], op: str) -> set[str]:
    """Of an operation's places in prompts."""
    return {o["schedule"] for o in found if o["op"] == op and "prefill" in o["uses"]}


def test_int8_has_one_kind_of_prefill(tiny_model: Callable[..., Path]) -> None:
    options = Options(target="cuda", prefill_weights="int8", **SIZES)
    found, rows = operations(tiny_model("llama", **WIDE), options)
    assert "prefill_greedy" in rows
    assert not any("int8" in name for name in rows)
    assert schedules(found, "linear_group") == {"int8_matmul"}
    assert schedules(found, "gate_up") == {"int8_gated_matmul", "gated_matmul"}  # the last one's


def test_a_group_with_another_format_stays_packed(tiny_model: Callable[..., Path]) -> None:
    weights = {"*": "Q4_K", "attn_v": "Q6_K", "output": "Q4_K"}
    options = Options(target="cuda", prefill_weights="int8", **SIZES)
    found, _ = operations(tiny_model("llama", **WIDE | {"weights": weights}), options)
    assert schedules(found, "linear_group") == {"matmul"}
    assert "int8_gated_matmul" in schedules(found, "gate_up")


def test_int8_that_pays_for_nothing_is_refused(tiny_model: Callable[..., Path]) -> None:
    options = Options(target="cuda", prefill_weights="int8", **SIZES)
    with pytest.raises(RequestError, match=r"no matrix of this model.*Q4_0: a float scale") as no:
        operations(tiny_model("llama", weights="Q4_0"), options)
    assert "leave it out" in no.value.hint
    auto, rows = operations(
        tiny_model("llama", weights="Q4_0"), dataclasses.replace(options, prefill_weights="auto")
    )
    assert not any("int8" in name for name in [*rows, *(o["schedule"] for o in auto)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefill_weights": "int8"}, "--prefill-weights int8: not for llvm"),
        ({"prefill_weights": "auto", "target": "cuda", "activations": "f32"}, "activations f32"),
        ({"prefill_weights": "f16", "target": "cuda"}, "--prefill-weights f16: not known"),
    ],
)
def test_what_cannot_be_is_refused_first(options: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Options(**options).check()
