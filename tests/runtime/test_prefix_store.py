"""K/V that leaves memory and comes back: evicted, after a restart, and when the store fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel
from stored_blocks import file_of

from xpuc.errors import XpucError
from xpuc.runtime.engine import Engine
from xpuc.runtime.extents import place_bytes
from xpuc.runtime.prefix_store import PrefixStore, open_store
from xpuc.runtime.store import BlockStore

pytest.importorskip("lmdb")

PREFIX = list(range(20, 50))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def engine_on(
    path: Path, *, identity: bytes = b"a model", places: int = 1000, **sizes: Any
) -> tuple[Engine, FakeModel]:
    model = FakeModel(**sizes)
    n_bytes = places * place_bytes(model.kv[0].block_bytes)
    store = open_store(path, model.kv, identity, n_bytes)
    return Engine(model, store=store, identity=identity), model


def store_of(engine: Engine) -> BlockStore:
    assert engine.store is not None
    (store,) = engine.store.stores
    return store


def answer(engine: Engine, prompt: list[int]) -> int:
    """Rows of the model's calls for it; the answer is that of an engine without a store."""
    model = engine.model
    assert isinstance(model, FakeModel)
    model.calls.clear()
    result = engine.generate(prompt, **GREEDY)
    assert result.error is None
    assert result.ids == Engine(FakeModel()).generate(prompt, **GREEDY).ids
    return sum(rows for _, rows, _ in model.calls) - (len(result.ids) - 1)


def test_a_restart_finds_what_was_cached(tmp_path: Path) -> None:
    prompt = [*PREFIX, 1, 2]
    with engine_on(tmp_path)[0] as engine:
        assert answer(engine, prompt) == 32
        assert store_of(engine).stats().entries == 0, "nothing left memory yet"
    engine, _ = engine_on(tmp_path)
    assert answer(engine, prompt) == 4
    assert (engine.kv.counters.hit_tokens, engine.kv.counters.store_tokens) == (0, 28)
    assert answer(engine, [*PREFIX, 3]) == 3, "from the pool now"
    assert engine.kv.counters.hit_tokens == 28
    engine.close()


def test_several_answers_to_a_prompt_from_the_store(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 4, "max_tokens": 10, "n": 3}
    with engine_on(tmp_path)[0] as engine:
        first = engine.generate(PREFIX, **options)
    with engine_on(tmp_path, max_batch=2, n_blocks=14)[0] as engine:
        again = engine.generate(PREFIX, **options)
    assert [each.ids for each in (again, *again.others)] == [
        each.ids for each in (first, *first.others)
    ]


def test_what_is_evicted_comes_back(tmp_path: Path) -> None:
    with engine_on(tmp_path, n_blocks=12)[0] as engine:
        assert answer(engine, [*PREFIX, 1, 2]) == 32
        assert answer(engine, [9] * 40) == 40
        assert engine.kv.groups[0].pool.counters.evictions > 8
        assert answer(engine, [*PREFIX, 1, 2]) == 4
        assert engine.kv.counters.store_tokens == 28


def test_a_preempted_request_takes_its_k_v_back(tmp_path: Path) -> None:
    engine, _ = engine_on(tmp_path, n_blocks=14)
    prompts = [[3] * 20, [4] * 20, [5] * 9]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    results = engine.generate(prompts, **options)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids == Engine(FakeModel()).generate(prompt, **options).ids
    assert engine.kv.counters.store_tokens > 0
    engine.kv.check()
    engine.close()


def test_only_what_is_not_stored_is_written_at_the_end(tmp_path: Path) -> None:
    prompt = [*PREFIX, 1, 2]
    engine, model = engine_on(tmp_path)
    answer(engine, prompt)
    engine.close()
    assert file_of(tmp_path, "extents").stat().st_size == 9 * place_bytes(model.kv[0].block_bytes)
    engine, _ = engine_on(tmp_path)
    answer(engine, prompt)
    store = store_of(engine)
    engine.close()
    assert store.stats().written_bytes == 0


def test_a_prefix_loses_its_end_first(tmp_path: Path) -> None:
    """In a store of four places, filled at the end of a process and by evictions in the next."""
    with engine_on(tmp_path, places=4)[0] as engine:
        answer(engine, [*PREFIX, 1, 2])
    with engine_on(tmp_path, places=4)[0] as engine:
        assert answer(engine, [*PREFIX, 1, 2]) == 32 - 16
    engine, model = engine_on(tmp_path, places=5)
    assert answer(engine, [*PREFIX[:16], 1]) == 1, "a use of four blocks"
    for key in (b"a stranger's one", b"a stranger's two"):
        store_of(engine).put(key, model.kv[0].buffers(0))
    links = engine.kv.groups[0].pool.chain([*PREFIX, 1])
    assert store_of(engine).longest([link.digest for link in links]) == 3
    engine.close()


def test_another_identity_finds_nothing(tmp_path: Path) -> None:
    with engine_on(tmp_path)[0] as engine:
        answer(engine, PREFIX)
    with engine_on(tmp_path, identity=b"another")[0] as engine:
        assert answer(engine, PREFIX) == 30
        assert engine.kv.counters.store_tokens == 0


@pytest.mark.parametrize("place", [0, 4])
def test_a_damaged_block_is_computed(place: int, tmp_path: Path) -> None:
    with engine_on(tmp_path)[0] as engine:
        answer(engine, [*PREFIX, 1, 2])
    extents = file_of(tmp_path, "extents")
    data = bytearray(extents.read_bytes())
    stride = len(data) // 9
    data[place * stride + 100] ^= 1
    extents.write_bytes(data)
    with engine_on(tmp_path)[0] as engine:
        # Written from the end: place 0 is the ninth block, which the answer began.
        assert answer(engine, [*PREFIX, 1, 2]) == (4 if place == 0 else 32 - 16)


@pytest.mark.parametrize("name", ["longest", "get", "put", "contains", "close"])
def test_no_error_of_the_store_fails_a_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_on(tmp_path)[0] as engine:
        answer(engine, [*PREFIX, 1, 2])
    engine, _ = engine_on(tmp_path, n_blocks=12)
    asked: list[object] = []

    def fails(*arguments: object) -> None:
        asked.append(arguments)
        raise RuntimeError("the store has a fault")

    close = store_of(engine).close
    monkeypatch.setattr(store_of(engine), name, fails)
    for prompt in ([*PREFIX, 1, 2], [9] * 40, [8] * 40):
        answer(engine, prompt)
    engine.close()
    close()
    assert len(asked) == 1, "it is not asked again"
    assert "the store has a fault" in caplog.text
    engine.kv.check()


def test_a_full_disk_is_a_miss_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_on(tmp_path, n_blocks=12)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_of(engine)._extents, "write", full)
    for prompt in (PREFIX, [9] * 40, PREFIX):
        answer(engine, prompt)
    engine.close()
    assert store_of(engine).stats().failed > 0


def test_closing_ends_what_runs_and_may_be_repeated(tmp_path: Path) -> None:
    engine, _ = engine_on(tmp_path)
    engine.add_request(PREFIX, n=2, **GREEDY)
    waiting = engine.add_request([1], **GREEDY)
    engine.step()
    engine.step()
    engine.close()
    engine.close()
    ends = [event for event in engine.step() if event.result is not None]
    assert {event.chunk.finish_reason for event in ends} == {"cancelled"}
    assert [event.request for event in ends].count(waiting) == 1
    assert (len(ends), engine.kv.n_used) == (3, 0)
    with engine_on(tmp_path)[0] as engine:
        assert answer(engine, PREFIX) == 2, "what ran was cached"


def test_a_closed_engine_goes_on_without_its_store(tmp_path: Path) -> None:
    engine, _ = engine_on(tmp_path, n_blocks=12)
    engine.close()
    for prompt in (PREFIX, [9] * 40, PREFIX):
        answer(engine, prompt)


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    with engine_on(tmp_path)[0], pytest.raises(XpucError, match="in use by process"):
        engine_on(tmp_path)


def test_what_was_not_read_whole_is_not_counted(tmp_path: Path) -> None:
    """A block that fails in the middle ends the prefix there, though later ones were read."""
    with engine_on(tmp_path)[0] as engine:
        answer(engine, [*PREFIX, 1, 2])
    engine, model = engine_on(tmp_path)
    links = engine.kv.groups[0].pool.chain([*PREFIX, 1, 2])
    store = store_of(engine)
    get = store.get
    store.get = lambda key, into: key != links[3].digest and get(key, into)  # type: ignore[method-assign]
    assert PrefixStore([store], model.kv).fill(0, list(range(7)), links) == 3
    engine.close()
