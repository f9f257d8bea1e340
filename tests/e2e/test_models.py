"""The real models, as the float32 forward on their dequantised weights says they should answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import agreement, forced_ids, kl_full, kl_top10, log_softmax, margins
from reference import Reference

import xpuc
from xpuc.runtime.batch import Batch
from xpuc.runtime.engine import Engine
from xpuc.runtime.scheduler import Span
from xpuc.runtime.score import borrowed

pytestmark = [pytest.mark.model, pytest.mark.slow]

LONG_TEXT = Path(__file__).parent.parent.parent / "LICENSE"
EXACT = {"activations": "f32", "kv": "f32", "max_batch": 1}


@dataclass
class Subject:
    """A model, what is recorded of it, and its builds."""

    reference: Reference
    recorded: Any
    default: Path
    exact: Path


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def subject(request, golden, compiled) -> Subject:
    gguf = request.getfixturevalue(f"{request.param}_gguf")
    reference = request.getfixturevalue(f"{request.param}_reference")
    recorded = golden(f"{request.param}.json")
    return Subject(reference, recorded, compiled(gguf), compiled(gguf, **EXACT))


def forced_logits(engine: Any, ids: list[int], n: int) -> np.ndarray:
    """(n, vocab): of the last n rows."""
    first = len(ids) - n
    rows = (logits.copy() for i, logits in engine.teacher_forced(ids) if i >= first)
    return np.stack(list(rows))


def last_logits(engine: Engine, ids: list[int], n: int) -> np.ndarray:
    """(n, vocab): of the last n rows; of those before them K/V alone are wanted."""
    model, kv, first = engine.model, engine.kv, len(ids) - n
    n_rows = min(model.max_chunk, model.max_out_rows)
    ends = [*range(0, first, model.max_chunk), *range(first, len(ids), n_rows), len(ids)]
    batch, found = Batch(model), []
    with borrowed(kv, ids) as sequence:
        for start, end in pairwise(ends):
            batch.fill([Span(sequence, start, end - start)], every_row=start >= first)
            rows = model.run(batch, tail="logits")
            if start >= first:
                found += [row.copy() for row in rows]
            kv.slide(sequence, end)
            assert kv.grow(sequence, len(ids), [])
    return np.stack(found)


def continuations(recorded: Any) -> Any:
    """(name, prompt ids, float32 record) of the prompts that have one."""
    for name, prompt in recorded["prompts"].items():
        if "f32" in prompt:
            yield name, prompt["token_ids"], prompt["f32"]


def test_the_exact_build_gives_the_float32_ids(subject):
    engine = xpuc.load(subject.exact, n_sequences=1)
    for name, prompt, f32 in continuations(subject.recorded):
        read = forced_ids(prompt, f32["greedy_ids"])
        logprobs = log_softmax(forced_logits(engine, read, len(f32["greedy_ids"])))
        found = agreement(f32["greedy_ids"], f32["margin"], logprobs.argmax(-1))
        assert found.holds(0.01), (name, found)
        assert kl_top10(f32["top10"], logprobs).mean() < 1e-5, name
    answer = engine.generate(prompt, max_tokens=16, temperature=0)
    n = len(answer.ids)  # up to the end of the answer, which the record runs past
    sure = next((i for i in range(n) if f32["margin"][i] <= 0.01), n)
    assert answer.ids[:sure] == f32["greedy_ids"][:sure]


def mean_divergence(engine: Any, recorded: Any) -> float:
    """Mean KL from the float32 record, of all continuations; sure ids are the same."""
    divergences = []
    for name, prompt, f32 in continuations(recorded):
        read = forced_ids(prompt, f32["greedy_ids"])
        logprobs = log_softmax(forced_logits(engine, read, len(f32["greedy_ids"])))
        found = agreement(f32["greedy_ids"], f32["margin"], logprobs.argmax(-1))
        assert found.holds(0.3), (name, found)
        divergences.append(kl_top10(f32["top10"], logprobs))
    return float(np.concatenate(divergences).mean())


def test_the_default_build_is_nearer_to_float32_than_llama_cpp(subject, record_property):
    mean = mean_divergence(xpuc.load(subject.default, n_sequences=1), subject.recorded)
    record_property("mean_kl", mean)
    assert mean <= subject.recorded["llama_cpp_mean_kl"]


def test_the_answer_that_a_gpu_is_held_to(smollm2_gguf, compiled, check_golden):
    """tests/emu compares SmolLM2 on the emulated GPU with it."""
    with xpuc.load(compiled(smollm2_gguf), n_sequences=1) as engine:
        ids = engine.generate("The capital of France is", max_tokens=16, temperature=0).ids
    check_golden("smollm2_answer.json", json.dumps(ids) + "\n")


def test_so_are_keys_and_values_in_q8_0(smollm2_gguf, golden, compiled, record_property):
    artifact = compiled(smollm2_gguf, kv="q8_0", max_batch=1, ctx=1024)
    recorded = golden("smollm2.json")
    mean = mean_divergence(xpuc.load(artifact, n_sequences=1), recorded)
    record_property("mean_kl", mean)
    assert mean <= recorded["llama_cpp_mean_kl"]


def test_past_a_thousand_tokens(subject, record_property):
    """Beyond Gemma's window; full-vocabulary KL of the last rows against the numpy forward."""
    engine = xpuc.load(subject.default, n_sequences=1)
    ids = engine.tokenizer.encode(LONG_TEXT.read_text(encoding="utf-8"))[:1120]
    wanted = subject.reference.forward(ids, rows=slice(-96, None))
    default = last_logits(engine, ids, 96)
    found = agreement(wanted.argmax(-1), margins(wanted), default.argmax(-1))
    assert found.holds(0.3), found
    mean = float(kl_full(wanted, default).mean())
    record_property("mean_kl", mean)
    assert mean <= subject.recorded["llama_cpp_mean_kl"]
    exact = last_logits(xpuc.load(subject.exact, n_sequences=1), ids, 96)
    assert np.abs(exact - wanted).max() <= 1e-3 * np.abs(wanted).max()
