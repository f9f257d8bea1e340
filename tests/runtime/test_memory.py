"""The memory statement: its terms, and the K/V blocks that free memory affords."""

from __future__ import annotations

import pytest
from cli_runs import manifest

from xpuc.errors import ArtifactError
from xpuc.runtime import memory

MODEL = manifest()
BLOCK = 4 * MODEL.kv.bytes_per_token
LOGITS = MODEL.max_out_rows * MODEL.n_vocab * 4
FIXED = MODEL.memory["activations"] + LOGITS + memory.RUNTIME_BYTES + memory.RESERVE_BYTES


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(memory, "free_bytes", lambda: FIXED + 30 * BLOCK + BLOCK // 2)
    return monkeypatch


@pytest.mark.usefixtures("free")
def test_the_pool_holds_the_sequences_asked_for_or_what_fits() -> None:
    assert memory.plan(MODEL, 2, 40).n_blocks == 20
    assert memory.plan(MODEL, 2, 41).n_blocks == 22
    assert memory.plan(MODEL, 4, 40).n_blocks == 30


@pytest.mark.usefixtures("free")
def test_the_terms_add_up_and_each_has_a_line() -> None:
    statement = memory.plan(MODEL, 2, 40)
    terms = (4200, 1 << 20, LOGITS, 20 * BLOCK, memory.RUNTIME_BYTES)
    assert statement.total == sum(terms)
    lines = statement.lines()
    shown = [float(line.split()[-2]) for line in lines]
    assert shown[1:-1] == [round(term / 2**20, 1) for term in terms]
    assert lines[4].startswith("K/V pool (20 blocks)")


@pytest.mark.usefixtures("free")
def test_one_sequence_must_fit() -> None:
    assert memory.plan(MODEL, 1, 120).n_blocks == 30
    with pytest.raises(ArtifactError, match="one sequence of 121 tokens"):
        memory.plan(MODEL, 1, 121)
