"""Steps that give back sampled tokens: who takes part, and that answers are the host's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draws import options_of
from fake_model import MODES, PIPELINED, FakeModel

from xpuc.artifact import SAMPLING_WORDS, TOP_K, Tail
from xpuc.runtime.device_sampler import Randoms
from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.generation import Timings
from xpuc.runtime.modes import Modes
from xpuc.runtime.sampler import Chain
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.runtime.speculation import Speculation

TAILS: dict[str, tuple[dict[str, Any], Tail]] = {
    "defaults": ({}, "sampled"),
    "greedy": ({"temperature": 0}, "greedy"),
    "greedy with a bias": ({"temperature": 0, "logit_bias": {1: 2.0}}, "logits"),
    "the most": ({"top_k": TOP_K, "min_p": 0, "top_p": 1, "temperature": 1}, "sampled"),
    "too many": ({"top_k": TOP_K + 1}, "logits"),
    "all": ({"top_k": 0}, "logits"),
    "as asked for": ({"samplers": "top_k;min_p"}, "sampled"),
    "another order": ({"samplers": "temperature;top_k;top_p"}, "logits"),
    "no top_k": ({"samplers": "top_p;temperature"}, "logits"),
    "at least some": ({"min_keep": 2}, "logits"),
    "a bias": ({"logit_bias": {3: -1.0}}, "logits"),
    "a changing temperature": ({"dynatemp_range": 0.2}, "logits"),
    **{
        name: ({name: value}, "logits")
        for name, value in (
            ("typical_p", 0.5), ("top_n_sigma", 1.0), ("xtc_probability", 0.5),
            ("repeat_penalty", 1.1), ("presence_penalty", 0.1), ("dry_multiplier", 1.0),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("options", "tail"), TAILS.values(), ids=TAILS)
def test_what_a_chain_takes_of_a_step(options: dict[str, Any], tail: Tail) -> None:
    chain = Chain(SamplingParams(**options))
    assert chain.tail == tail
    assert (chain.sampling is None) == (tail == "logits")


def test_a_model_that_gives_logits_only_is_asked_for_nothing_else() -> None:
    """Not for the chunk of a prompt either, whose result nobody wants."""
    model = FakeModel(tails=("logits",), max_chunk=4)
    result = Engine(model).generate(list(range(1, 11)), temperature=0, max_tokens=2)
    assert result.error is None
    assert {tail for _, _, tail in model.calls} == {"logits"}


def test_a_row_holds_what_its_samplers_are_given() -> None:
    def row(u: float, **options: Any) -> dict[str, Any]:
        rows = np.full((2, SAMPLING_WORDS), -1, np.int32)
        sampling = Chain(SamplingParams(**options)).sampling
        assert sampling is not None
        sampling.write(rows.reshape(-1).data, 1, u, (5, 3))
        assert (rows[0] == -1).all()
        found = options_of(rows[1])
        assert found.pop("banned") == [5, 3]
        return found

    found = row(0.123456789012345, top_k=7, top_p=0.3, min_p=0.25, temperature=2.5)
    assert found["min_p"] == pytest.approx(0.25, rel=1e-7)
    del found["min_p"]
    assert found == {"u": 0.123456789012345, "top_k": 7, "top_p": 0.3, "temperature": 2.5}
    off = {"u": 0.5, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "top_k": 40}
    assert row(0.5, samplers="top_k") == off
    assert row(0.5, temperature=0)["temperature"] == 0
    assert row(0.5, temperature=0)["top_k"] == 1
    assert row(0.5, temperature=1e-30)["temperature"] == pytest.approx(1e-8)
    assert row(0.5, temperature=1e300)["temperature"] == pytest.approx(1e38)


def test_random_numbers_can_be_seen_ahead_of_their_turn() -> None:
    plain, seen = Randoms(7), Randoms(7)
    want = [plain.random() for _ in range(6)]
    assert [seen.ahead(2), seen.ahead(0), seen.random(), seen.ahead(3)] == [
        want[2], want[0], want[0], want[4],
    ]  # fmt: skip
    assert [seen.random() for _ in range(5)] == want[1:]


def engine_of(*tails: Tail, **sizes: Any) -> Engine:
    draft_max = sizes.pop("draft_max", 0)
    model = FakeModel(**({"tails": ("logits", *tails)} | sizes))
    return Engine(model, speculation=Speculation(draft_max, 1, 3))


def told(result: Result) -> list[Result]:
    """All of a request's answers, without their times."""
    none = Timings(0, 0, 0.0, 0.0, 0.0)
    return [replace(each, timings=none, others=()) for each in (result, *result.others)]


def tails_of(engine: Engine) -> list[Tail]:
    assert isinstance(engine.model, FakeModel)
    return [tail for _, _, tail in engine.model.calls]


WAYS: dict[str, tuple[list[dict[str, Any]], set[Tail]]] = {
    "alone": ([{"seed": 1}], {"sampled"}),
    "several": ([{"seed": i, "top_k": 5 + i, "temperature": 0.5 + i} for i in range(4)],
                {"sampled"}),
    "with a greedy one": ([{"seed": 1}, {"seed": 0, "temperature": 0, "max_tokens": 3}],
                          {"sampled"}),
    "greedy ones": ([{"temperature": 0, "seed": 0}] * 2, {"greedy"}),
    "with one of penalties": ([{"seed": 1, "max_tokens": 9}, {"seed": 2, "repeat_penalty": 1.2}],
                              {"logits"}),
    "after one of penalties": ([{"seed": 1}, {"seed": 2, "repeat_penalty": 1.2, "max_tokens": 3}],
                               {"logits", "sampled"}),
    "log probabilities": ([{"seed": 1, "logprobs": 2}], {"logits"}),
    "least tokens": ([{"seed": 1, "min_tokens": 5, "stop_ids": (3,)}], {"sampled"}),
    "least tokens of a greedy one": (
        [{"seed": 0, "temperature": 0, "min_tokens": 5, "stop_ids": (3, 9)}], {"greedy", "sampled"}
    ),
    "many that must not end": (
        [{"seed": 1, "min_tokens": 5, "stop_ids": tuple(range(9))}], {"logits", "sampled"}
    ),
    "several answers": ([{"seed": 1, "n": 3}], {"logits", "sampled"}),
}  # fmt: skip


@pytest.mark.parametrize("modes", [MODES, PIPELINED], ids=["plain", "pipelined"])
@pytest.mark.parametrize(("requests", "tails"), WAYS.values(), ids=WAYS)
def test_answers_are_those_of_the_host(
    requests: list[dict[str, Any]], tails: set[Tail], modes: Modes
) -> None:
    answers = []
    for engine in (engine_of("greedy", "sampled", modes=modes), engine_of("greedy")):
        with engine:
            for i, options in enumerate(requests):
                prompt = [5 + i, *range(1 + 7 * i)]
                engine.add_request(prompt, **({"max_tokens": 12} | options))
            results: dict[tuple[int, int], list[Result]] = {}
            while engine.has_work:
                for event in engine.step():
                    if event.result is not None:
                        results[event.request.id, event.index] = told(event.result)
            answers.append((results, set(tails_of(engine))))
            is_ahead = engine.scheduler.counters.sums["n_ahead"] > 0
            assert is_ahead == (engine.modes.pipelined.is_on and tails != {"logits"})
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] == tails
    assert "sampled" not in answers[1][1]
    assert min(len(r.ids) for (r,) in answers[0][0].values()) >= 3, "too short to say anything"


@pytest.mark.parametrize("ends", [{}, {"min_tokens": 20, "stop_ids": (5,)}])
@pytest.mark.parametrize("draft_max", [1, 3])
def test_drafts_of_sampled_steps_take_the_random_numbers_of_their_turn(
    draft_max: int, ends: dict[str, Any]
) -> None:
    options = {"seed": 3, "max_tokens": 40, "top_k": 2} | ends
    sizes = {"n_vocab": 8, "buckets": (1, 2, 4, 8), "max_batch": 8, "draft_max": draft_max}
    drafting, plain = engine_of("greedy", "sampled", **sizes), engine_of("greedy", n_vocab=8)
    with drafting, plain:
        found = drafting.generate([3, 1, 2, 3, 1, 2, 3, 1], **options)
        want = plain.generate([3, 1, 2, 3, 1, 2, 3, 1], **options)
        assert found.ids == want.ids
        assert found.timings.n_accepted > 0
        assert found.timings.n_drafted > found.timings.n_accepted
        assert "sampled" in tails_of(drafting)


def test_logits_that_are_no_numbers_end_the_request_and_no_other() -> None:
    with engine_of("greedy", "sampled") as engine:
        assert isinstance(engine.model, FakeModel)
        engine.model.nan_tokens = {7}
        bad = engine.generate([1, 7], seed=1)
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert "after 2 tokens are unfit" in bad.error
        assert len(engine.generate([1, 6], seed=1, max_tokens=4).ids) == 4
        assert set(tails_of(engine)) == {"sampled"}
