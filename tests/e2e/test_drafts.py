"""On compiled models: answers with drafts have the tokens and the logits of those without."""

from __future__ import annotations

import numpy as np
import pytest

import xpuc
from xpuc.runtime.generation import Generation
from xpuc.runtime.speculation import Speculation

pytestmark = pytest.mark.slow

SMALL = {"ctx": 160, "max_chunk": 64, "max_batch": 4, "deterministic": True}
PROMPT = [5, 6, 7, 8] * 9
TEXT = (
    "The old lighthouse stood at the edge of the cliff, where the sea had eaten away the path."
    " Every evening the keeper climbed the two hundred steps and lit the lamp, although no ship had"
    " passed in years. He said the light was not for the ships but for the birds, who came in"
    " autumn from the north and would not find the island without it."
)
WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3, "temperature": 0.7, "logprobs": 2},
    "penalties": {"seed": 3, "repeat_penalty": 1.1, "presence_penalty": 0.2, "logprobs": 0},
    "two tokens": {"seed": 3, "logprobs": 1, "logit_bias": {5: 60.0, 6: 62.0}, "samplers": ""},
}


@pytest.fixture
def chosen_from(monkeypatch):
    """What each token was chosen from, in order: the bytes of its logits, or the likeliest id."""
    seen = []
    choose = Generation.choose

    def watched(self, row, tail):
        seen.append(np.asarray(row).tobytes() if tail == "logits" else int(row))
        return choose(self, row, tail)

    monkeypatch.setattr(Generation, "choose", watched)
    return seen


def answers(artifact, chosen_from, prompt, draft_max, max_tokens=100, **options):
    """(ids, logprobs, what they were chosen from), and how many drafts were right."""
    chosen_from.clear()
    with xpuc.load(artifact, speculation=Speculation(draft_max, 1, 3)) as engine:
        result = engine.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **options)
        assert engine.kv.n_used == 0
        engine.kv.check()
    return (result.ids, result.logprobs, list(chosen_from)), result.timings.n_accepted


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_change_no_bit(name, options, tiny_model, compiled, chosen_from):
    artifact = compiled(tiny_model(name, weights="Q8_0"), **SMALL)
    plain, _ = answers(artifact, chosen_from, PROMPT, 0, **options)
    drafted, n_accepted = answers(artifact, chosen_from, PROMPT, 3, **options)
    assert drafted == plain
    if options.get("logit_bias") or options.get("temperature") == 0:
        assert n_accepted > 10


@pytest.mark.model
def test_a_text_is_repeated_in_fewer_steps(smollm2_gguf, compiled, chosen_from):
    artifact = compiled(smollm2_gguf, ctx=256, max_batch=4, deterministic=True)
    chat = [{"role": "user", "content": f"Repeat this text word for word:\n\n{TEXT}"}]
    for options in ({"temperature": 0}, {"seed": 1, "temperature": 0.5, "logprobs": 0}):
        plain, _ = answers(artifact, chosen_from, chat, 0, max_tokens=60, **options)
        drafted, n_accepted = answers(artifact, chosen_from, chat, 3, max_tokens=60, **options)
        assert drafted == plain
        assert n_accepted > 20
