"""On a compiled model: wherever the K/V of a prompt comes from, the logits are the same bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xpuc.artifact import LIBRARY, Tail, read_manifest
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.generation import Generation
from xpuc.runtime.prefix_store import identity_of

pytest.importorskip("lmdb")

PROMPT = [5, 6, 7, 8] * 9  # two blocks of sixteen and four tokens
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0}
SEEDS = (3, 4, 5)

Bits = dict[int, list[bytes]]  # by seed, the logits that each token was chosen from


@pytest.fixture(params=["llama", "gemma3_pattern"])
def artifact(request: pytest.FixtureRequest, artifacts: dict[str, Path]) -> Path:
    return artifacts[request.param]


@pytest.fixture
def bits(monkeypatch: pytest.MonkeyPatch) -> Bits:
    seen: Bits = {}
    choose = Generation.choose

    def watched(self: Generation, row: Any, tail: Tail) -> Any:
        assert tail == "logits"
        seen.setdefault(self._seed, []).append(np.asarray(row).tobytes())
        return choose(self, row, tail)

    monkeypatch.setattr(Generation, "choose", watched)
    return seen


def ask(engine: Engine, bits: Bits, seed: int, n: int = 1) -> Bits:
    """The logits of n answers, each of twelve tokens."""
    bits.clear()
    result = engine.generate(PROMPT, seed=seed, n=n, **OPTIONS)
    assert [len(each.ids) for each in (result, *result.others)] == [12] * n
    assert engine.kv.n_used == 0
    return dict(bits)


@pytest.mark.slow
def test_alone_forked_from_the_pool_and_from_the_store(
    artifact: Path, bits: Bits, tmp_path: Path
) -> None:
    engine = load(artifact)
    engine.kv.reuse = False
    alone: Bits = {}
    for seed in SEEDS:
        alone |= ask(engine, bits, seed)
    assert engine.kv.counters.hit_tokens == 0
    assert len({rows[0] for rows in alone.values()}) == 1, "the first token's are of the prompt"
    assert len({rows[-1] for rows in alone.values()}) == len(SEEDS)

    log = tmp_path / "steps.jsonl"
    with load(artifact, store=tmp_path / "store", step_log=log) as engine:
        assert ask(engine, bits, SEEDS[0], n=len(SEEDS)) == alone, "forked; one waits for room"
        assert engine.kv.groups[0].pool.counters.copies > 0
        for seed in SEEDS:
            hits = engine.kv.counters.hit_tokens
            assert ask(engine, bits, seed) == {seed: alone[seed]}, "its prefix from the pool"
            assert engine.kv.counters.hit_tokens == hits + 32
    assert sum(json.loads(line)["n_copies"] for line in log.read_text().splitlines()[1:]) > 0

    with load(artifact, store=tmp_path / "store", warm_rows=16) as engine:
        assert ask(engine, bits, SEEDS[0], n=len(SEEDS)) == alone, "from the store after a restart"
        assert engine.kv.counters.store_tokens >= 32
    with load(artifact, store=tmp_path / "store") as engine:
        assert ask(engine, bits, SEEDS[1]) == {SEEDS[1]: alone[SEEDS[1]]}
        assert (engine.kv.counters.hit_tokens, engine.kv.counters.store_tokens) == (0, 32)


def ask_both(engine: Engine, bits: Bits) -> Bits:
    """The logits of two requests that run at the same time, to forty tokens each."""
    bits.clear()
    options = OPTIONS | {"max_tokens": 40}
    for seed, prompt in zip(SEEDS[:2], (PROMPT[:17], PROMPT[1:18]), strict=True):
        engine.add_request(prompt, seed=seed, **options)
    n_ended = 0
    while engine.has_work:
        n_ended += sum(event.result is not None for event in engine.step())
    assert n_ended == 2
    engine.kv.check()
    assert sorted(map(len, bits.values())) == [40, 40]
    return dict(bits)


@pytest.mark.slow
def test_one_by_one_batched_chunked_and_preempted(artifact: Path, bits: Bits) -> None:
    engine = load(artifact)
    engine.kv.reuse = False
    engine.scheduler.max_running = 1
    one_by_one = ask_both(engine, bits)
    engine = load(artifact)
    assert ask_both(engine, bits) == one_by_one
    assert engine.scheduler.counters.sums["decode_tokens"] > 70
    engine = load(artifact)
    engine.scheduler.max_chunk = 5
    assert ask_both(engine, bits) == one_by_one
    for reuse in (False, True):
        engine = load(artifact)
        engine.kv.reuse = reuse
        engine.kv.groups[0].pool.allocate(2)  # six blocks are left, both want a fourth
        assert ask_both(engine, bits) == one_by_one
        assert engine.scheduler.counters.sums["n_resumed"] > 0
    assert engine.kv.counters.hit_tokens > 0


@pytest.mark.slow
def test_windows_keep_a_ring(artifacts: dict[str, Path]) -> None:
    """Sixty tokens of a window of eight, in three blocks of sixteen."""
    engine = load(artifacts["gemma3_pattern"], n_sequences=1)
    assert (engine.model.windows, engine.model.n_blocks) == ((0, 8), (4, 3))
    seen = set()
    engine.add_request(PROMPT[:17], max_tokens=43, ignore_eos=True, temperature=0)
    while engine.has_work:
        for sequence in engine.scheduler.running:
            seen.add(tuple(sum(block >= 0 for block in blocks) for blocks in sequence.blocks))
        engine.step()
    assert seen == {(2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (4, 1)}


@pytest.mark.slow
def test_greedy_answers_are_the_same_ids(artifact: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    alone = load(artifact).generate(PROMPT, **options).ids
    for _ in range(2):
        with load(artifact, store=tmp_path) as engine:
            result = engine.generate(PROMPT, n=3, **options)
            assert [each.ids for each in (result, *result.others)] == [alone] * 3
    assert engine.kv.counters.store_tokens >= 32


@pytest.mark.slow
def test_what_the_k_v_hangs_on_is_in_its_identity(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    library = manifest.files | {LIBRARY: manifest.files[LIBRARY] | {"xxh3_128": "0"}}
    others = [
        dataclasses.replace(manifest, source=manifest.source | {"xxh3_128": "0"}),
        dataclasses.replace(manifest, files=library),
        *(
            dataclasses.replace(manifest, kv=dataclasses.replace(manifest.kv, **change))
            for change in (
                {"dtype": "float32"},
                {"dtype": "q8_0"},
                {"block_tokens": 32},
                {"layers": ((1, 8, 0),)},
            )
        ),
    ]
    identities = {identity_of(each) for each in (manifest, *others)}
    assert len(identities) == 1 + len(others)
    renamed = dataclasses.replace(manifest, name="another name", max_batch=7)
    assert identity_of(renamed) == identity_of(manifest)
