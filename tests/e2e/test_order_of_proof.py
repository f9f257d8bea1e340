"""The order of proof: however a request is served, its logits are the bits it gets alone.

Alone, with others, in uneven chunks, preempted, forked, with drafts, from the pool, from the store,
in another process. A build whose schedules keep a row's bits whatever the batch is held to bits; on
this target that is the default build as well as `--deterministic`. One that does not is held to the
same likeliest ids wherever the margin is at least 0.05.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from row_bits import OPTIONS, Errand, Recorder, Row, Rows, Seen, check_same, rows_by_text
from row_bits import __file__ as row_bits_program

from xpuc.artifact import read_manifest
from xpuc.runtime.chunks import ChunkPolicy
from xpuc.runtime.cost_model import Work
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.phases import StepRecord
from xpuc.runtime.speculation import Speculation
from xpuc.schedules.llvm import SCHEDULES

pytestmark = [pytest.mark.model, pytest.mark.slow]

LICENSE = Path(__file__).parents[2] / "LICENSE"
N_NEW = 16  # tokens of every answer
GREEDY = OPTIONS | {"temperature": 0, "max_tokens": N_NEW}
SAMPLED = OPTIONS | {"temperature": 1.0, "max_tokens": N_NEW}
SEEDS = (3, 4)
# A block has 16 tokens, a segment of attention 128.
LENGTHS = (3, 9, 15, 16, 17, 31, 33, 48, 64, 77, 100, 127, 129, 200)
SHARED, LONG = 530, (541, 600)  # Gemma's window has 512
QUESTIONS = ("Why is the sky blue?", "Name three rivers.", "What is 7 times 8?", "Write a haiku.")
CTX = 640  # room for the longest


UNEVEN = (7, 1, 64, 16, 2, 128, 33)


class Chunks(ChunkPolicy):
    """Prompts are read in these sizes, over and over, however long that takes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._cycle = itertools.cycle(sizes)

    def size(self, decoding: Work, n_behind: int, room: int, *_: int) -> int:
        return min(next(self._cycle), n_behind, room)


@dataclass
class Subject:
    """A build, the prompts it is asked, and what it says to each of them alone.

    forked  the prompts that are asked with each of SEEDS as well
    """

    artifact: Path
    keeps_bits: bool
    prompts: list[list[int]]
    forked: list[list[int]]
    alone: Rows

    def engine(self, **options: Any) -> Engine:
        """Its pool holds all the prompts and their answers, unless another size is given."""
        return load(self.artifact, **({"ctx": CTX, "n_sequences": 12} | options))

    def check(self, seen: Sequence[Seen], prompts: Sequence[Sequence[int]]) -> None:
        """Every row of the greedy answers to `prompts`, once each."""
        assert len(seen) == N_NEW * len(prompts)
        assert len({each.text for each in seen}) == len(seen)
        assert (
            check_same(self.alone, seen, bits=self.keeps_bits) == len(seen) or not self.keeps_bits
        )


def keeps_bits(artifact: Path) -> bool:
    """Whether a row's bits do not depend on what else is in the call, by the schedules chosen."""
    manifest = read_manifest(artifact)
    invariant = {schedule.name for schedule in SCHEDULES if schedule.batch_invariant}
    chosen = {each["schedule"] for each in manifest.decisions["operations"]}
    return manifest.deterministic or chosen <= invariant


def prompts_of(engine: Engine) -> list[list[int]]:
    """Texts on both sides of the ends of blocks and segments, chats, and two that go past the
    window; the chats share their beginning, and so do the long ones."""
    assert engine.tokenizer is not None
    text = engine.tokenizer.encode(LICENSE.read_text(encoding="utf-8"))
    starts = itertools.accumulate(LENGTHS, initial=0)
    texts = [text[start : start + n] for start, n in zip(starts, LENGTHS, strict=False)]
    begun = [
        {"role": "user", "content": "I shall ask short questions. Answer each in one sentence."},
        {"role": "assistant", "content": "Of course. I will be brief."},
    ]
    chats = [
        engine.prompts.read([*begun, {"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    long = [text[:SHARED] + text[n : 2 * n - SHARED] for n in LONG]
    return [*texts, *chats, *long]


def answers_alone(artifact: Path) -> tuple[list[list[int]], list[list[int]], Rows]:
    engine = load(artifact, ctx=CTX, n_sequences=1)
    engine.kv.reuse = False
    prompts = prompts_of(engine)
    forked = prompts[4:8]
    recorder = Recorder(engine)
    for prompt in prompts:
        engine.generate(prompt, **GREEDY)
    for prompt, seed in itertools.product(forked, SEEDS):
        engine.generate(prompt, **SAMPLED, seed=seed)
    assert set(recorder.kinds) == {"decode", "prefill", "mixed"}
    assert recorder.kinds["mixed"] == engine.kv.counters.hit_tokens == 0
    return prompts, forked, rows_by_text(recorder.seen)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def gguf(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_gguf")
    return path


@pytest.fixture(scope="module")
def subject(gguf: Path, compiled: Any) -> Subject:
    artifact = compiled(gguf, deterministic=True)
    assert keeps_bits(artifact)
    return Subject(artifact, True, *answers_alone(artifact))


def test_the_prompts_are_what_the_proof_wants(subject: Subject) -> None:
    lengths = sorted(map(len, subject.prompts))
    assert len(lengths) >= 20
    assert sum(n > 512 for n in lengths) == 2
    assert lengths[-1] + N_NEW <= CTX
    firsts = [tuple(prompt[:32]) for prompt in subject.prompts if len(prompt) > 32]
    assert sorted(firsts.count(each) for each in set(firsts))[-2:] == [2, 4]
    # Every row of an answer is of a text of its own, but for the prompts' last of the sampled ones.
    n_sampled = len(SEEDS) * len(subject.forked) * (N_NEW - 1)
    n_greedy = N_NEW * len(lengths)
    assert n_greedy + n_sampled // 2 < len(subject.alone) <= n_greedy + n_sampled


def test_together_in_small_uneven_chunks(subject: Subject) -> None:
    engine = subject.engine()
    engine.kv.reuse = False
    engine.scheduler.chunks = Chunks(*UNEVEN)
    recorder = Recorder(engine)
    engine.generate(subject.prompts, **GREEDY)
    subject.check(recorder.seen, subject.prompts)
    assert set(UNEVEN) <= set(recorder.chunks)
    assert max(recorder.chunks) == max(UNEVEN)
    assert recorder.kinds["cols"] > 0
    assert recorder.kinds["mixed"] > 20


def evict_all(engine: Engine) -> None:
    """All that is cached and nobody's leaves the pools, for the store if there is one."""
    for group in engine.kv.groups:
        group.pool.free(group.pool.allocate(group.pool.n_free))


def run_short(engine: Engine, *, evicts: bool = False) -> None:
    """No block is free whenever a sequence wants its next one, so that the youngest must yield.

    What it leaves can be found when it goes on, in the pools or, if that `evicts`, in the store.
    """
    pools = [group.pool for group in engine.kv.groups]
    held: list[list[int]] = [[] for _ in pools]

    def end_of_step(_: StepRecord) -> None:
        for pool, blocks in zip(pools, held, strict=True):
            pool.free(blocks)
            blocks.clear()
        if evicts:
            evict_all(engine)
        running = engine.scheduler.running
        if len(running) > 1 and any(len(each.tokens) > each.n_room for each in running):
            for pool, blocks in zip(pools, held, strict=True):
                blocks += pool.allocate(pool.n_free)

    engine.scheduler.on_step = end_of_step


@pytest.mark.parametrize("source", ["computed again", "the pool", "the store"])
def test_preempted_and_resumed(subject: Subject, source: str, tmp_path: Path) -> None:
    has_store = source == "the store"
    with subject.engine(store=tmp_path if has_store else None) as engine:
        engine.kv.reuse = source != "computed again"
        engine.scheduler.chunks = Chunks(engine.model.max_chunk)
        run_short(engine, evicts=has_store)
        recorder = Recorder(engine)
        for some in (subject.prompts[:-2], subject.prompts[-2:]):  # the long ones by themselves
            n_before = len(recorder.preempted)
            engine.generate(some, **GREEDY)
            assert len(recorder.preempted) > n_before
        subject.check(recorder.seen, subject.prompts)
        assert len(recorder.resumed) >= len(recorder.preempted)
        n_tokens = [each.n_tokens for each in recorder.seen if each.sequence in recorder.preempted]
        assert max(n_tokens) > 512
        assert (max(recorder.resumed) > 512) == engine.kv.reuse
        assert (engine.kv.counters.store_tokens > 0) == has_store


def test_forked(subject: Subject) -> None:
    engine = subject.engine()
    recorder = Recorder(engine)
    for prompt in subject.forked:
        recorder.seen.clear()
        engine.generate(prompt, **SAMPLED, seed=SEEDS[0], n=len(SEEDS))
        assert len(recorder.seen) == len(SEEDS) * (N_NEW - 1) + 1, "the prompt's row is for both"
        n = check_same(subject.alone, recorder.seen, bits=subject.keeps_bits)
        assert n == len(recorder.seen) or not subject.keeps_bits
    copies = sum(group.pool.counters.copies for group in engine.kv.groups)
    assert copies >= 3, "all but the prompt that ends with its block"


def test_with_drafts(subject: Subject) -> None:
    engine = subject.engine(speculation=Speculation(3, ngram_min=1, ngram_max=3))
    recorder = Recorder(engine)
    for some in range(0, len(subject.prompts), 2):
        engine.generate(subject.prompts[some : some + 2], **GREEDY)
    sums = engine.scheduler.counters.sums
    assert 0 < sums["n_accepted"] < sums["n_drafted"]
    chosen_from = [each for each in recorder.seen if each.text in subject.alone]
    assert len(recorder.seen) > len(chosen_from), "rows of drafts that were wrong"
    subject.check(chosen_from, subject.prompts)


def test_from_the_pool_from_the_store_and_after_a_restart(subject: Subject, tmp_path: Path) -> None:
    found = sum((len(prompt) - 1) // 16 * 16 for prompt in subject.prompts)
    with subject.engine(store=tmp_path) as engine:
        recorder, counters = Recorder(engine), engine.kv.counters
        engine.generate(subject.prompts, **GREEDY)
        subject.check(recorder.seen, subject.prompts)
        assert min(recorder.kinds["cols"], recorder.kinds["mixed"]) > 0
        for place in ("the pool", "the store"):
            hits, stored = counters.hit_tokens, counters.store_tokens
            recorder.seen.clear()
            engine.generate(subject.prompts, **GREEDY)
            subject.check(recorder.seen, subject.prompts)
            fresh = (counters.hit_tokens - hits, counters.store_tokens - stored)
            if place == "the pool":
                assert fresh == (found, 0)
                evict_all(engine)
            else:
                assert sum(fresh) == found
                assert fresh[1] > found // 2, "what prompts share is read once"
    with subject.engine(store=tmp_path) as engine:
        recorder = Recorder(engine)
        engine.generate(subject.prompts, **GREEDY)
        subject.check(recorder.seen, subject.prompts)
        assert engine.kv.counters.store_tokens > found // 2
    errand = Errand(
        str(subject.artifact), str(tmp_path), subject.prompts, GREEDY,
        {"ctx": CTX, "n_sequences": 12, "threads": 2},
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, row_bits_program], input=json.dumps(asdict(errand)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["store_tokens"] > found // 2
    seen = [Seen(*given, Row(*row)) for *given, row in answer["seen"]]
    subject.check(seen, subject.prompts)


def flip_a_bit(engine: Engine, prompt: Sequence[int]) -> None:
    """In V of a layer of each group, of the last block that is cached of a prompt."""
    for group, memory in zip(engine.kv.groups, engine.model.kv, strict=True):
        link = group.pool.chain(prompt)[-1]
        memory.buffers(group.pool.find(link))[-1][-1] ^= 0x40  # an exponent's highest bit


def test_one_bit_of_k_v_is_noticed(subject: Subject, tmp_path: Path) -> None:
    """What the other tests show, they would not if K/V of anything else were read."""
    *others, prompt = subject.prompts[8:12]

    def is_same(engine: Engine, asked: Iterable[Sequence[int]]) -> bool:
        recorder = Recorder(engine)
        engine.generate([list(each) for each in asked], **GREEDY)
        try:
            check_same(subject.alone, recorder.seen)
        except AssertionError:
            return False
        return len(recorder.seen) == N_NEW

    with subject.engine(store=tmp_path) as engine:
        assert is_same(engine, [prompt])
        flip_a_bit(engine, prompt)
        assert not is_same(engine, [prompt]), "from the pool"
        assert all(is_same(engine, [other]) for other in others)
        evict_all(engine)
        assert not is_same(engine, [prompt]), "from the store"
        assert engine.kv.counters.store_tokens > 0
    with subject.engine(store=tmp_path) as engine:
        assert not is_same(engine, [prompt]), "after a restart"
        assert all(is_same(engine, [other]) for other in others)


def test_the_default_build_keeps_them_too(gguf: Path, compiled: Any, subject: Subject) -> None:
    """With others, in uneven chunks, preempted, found; against the other build alone."""
    artifact = compiled(gguf)
    default = replace(subject, artifact=artifact, keeps_bits=keeps_bits(artifact))
    engine = default.engine()
    run_short(engine)
    engine.scheduler.chunks = Chunks(150, 1, 80, 300)
    recorder = Recorder(engine)
    engine.generate(default.prompts, **GREEDY)
    default.check(recorder.seen, default.prompts)
    assert min(recorder.kinds["cols"], recorder.kinds["mixed"], len(recorder.preempted)) > 0
    assert not read_manifest(artifact).deterministic
