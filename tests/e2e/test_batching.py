"""A sequence's logits do not depend on how it is cut into calls, nor on what else is in them."""

from __future__ import annotations

import numpy as np
import pytest
from compare import log_softmax, logit_agreement
from stepping import Stepper, in_chunks, row_by_row

from xpuc.runtime.engine import Engine

pytestmark = pytest.mark.slow

SMALL = {"ctx": 160, "max_chunk": 64, "max_batch": 4}
BUILDS = {
    "int8": {"deterministic": True},
    "f32": {"deterministic": True, "activations": "f32", "kv": "f32"},
    "q8_0": {"deterministic": True, "kv": "q8_0"},
    "default": {},
}
CASES = [
    *(("int8", name) for name in ("llama", "qwen2", "qwen3", "gemma3")),
    ("f32", "llama"),
    *(("q8_0", name) for name in ("qwen3", "gemma3")),
    *(("default", name) for name in ("llama", "gemma3")),
]
# Lengths on both sides of a segment's and of a block's end.
TEXTS = [[5 + (i * step) % 250 for i in range(n)] for n, step in ((150, 37), (128, 53), (33, 11))]
UNEVEN = (7, 1, 33, 16, 2, 64, 5)


def together(model, texts) -> list[np.ndarray]:
    """One token of each a call: the buckets of columns, padded where there are three."""
    stepper = Stepper(model, texts)
    kinds = set()
    while left := list(stepper.left()):
        kinds.add(stepper.step(dict.fromkeys(left, 1)))
    assert "cols" in kinds
    return stepper.logits


def mixed(model, texts, seed: int) -> list[np.ndarray]:
    """Chunks of some and single tokens of others in one call, in any order."""
    rng = np.random.default_rng(seed)
    stepper = Stepper(model, texts)
    while left := list(stepper.left()):
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
        counts = {i: int(rng.choice([1, 1, 3, 8, 20])) for i in chosen}
        stepper.step({i: min(n, len(texts[i]) - stepper.done[i]) for i, n in counts.items()})
    return stepper.logits


def every_way(model, texts) -> dict[str, list[np.ndarray]]:
    """Logits of each text, by how they were read; the first is row by row."""
    return {
        "row by row": [row_by_row(model, text) for text in texts],
        "one chunk": [in_chunks(model, text, [model.max_out_rows]) for text in texts],
        "uneven chunks": [in_chunks(model, text, UNEVEN) for text in texts],
        "together": together(model, texts),
        **{f"mixed {seed}": mixed(model, texts, seed) for seed in range(3)},
    }


def check(build, found, record_property) -> None:
    alone = found.pop("row by row")
    apart = 0.0
    for way, logits in found.items():
        for i, (expected, given) in enumerate(zip(alone, logits, strict=True)):
            assert np.isfinite(given).all(), (way, i)
            if build == "default":
                assert logit_agreement(expected, given).holds(0.05), (way, i)
                apart = max(apart, np.abs(log_softmax(expected) - log_softmax(given)).max())
            else:
                np.testing.assert_array_equal(given, expected, err_msg=f"{way}, text {i}")
    record_property("max_logprob_difference", apart)


@pytest.mark.parametrize(("build", "name"), CASES)
def test_the_same_logits_however_a_text_is_read(build, name, tiny_model, loaded, record_property):
    model = loaded(tiny_model(name, weights="Q8_0"), **SMALL, **BUILDS[build])
    check(build, every_way(model, TEXTS), record_property)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_alone_are_wanted_are_the_same(name, tiny_model, loaded):
    """Behind the last layer's attention a call with a chunk goes on with them only."""
    model = loaded(tiny_model(name, weights="Q8_0"), **SMALL, **BUILDS["int8"])
    stepper = Stepper(model, TEXTS)
    while left := list(stepper.left()):
        counts = {i: min(20, len(TEXTS[i]) - stepper.done[i]) for i in left}
        stepper.step(counts, every_row=False)
    for text, given in zip(TEXTS, stepper.logits, strict=True):
        ends = sorted({*range(19, len(text), 20), len(text) - 1})
        assert np.flatnonzero(np.isfinite(given).all(axis=1)).tolist() == ends
        np.testing.assert_array_equal(given[ends], row_by_row(model, text)[ends])


def test_requests_served_together_get_the_answers_they_get_alone(tiny_model, loaded):
    """Through the engine, whose steps mix prompts that are read with answers that are written."""
    model = loaded(tiny_model("llama", weights="Q8_0"), **SMALL, **BUILDS["int8"])
    prompts = [text[: 10 + 7 * i] for i, text in enumerate(TEXTS * 3)]  # more than fit in a batch
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        alone = [Engine(model).generate(p, max_tokens=20, **options).ids for p in prompts]
        served = Engine(model).generate(prompts, max_tokens=20, **options)
        assert [answer.ids for answer in served] == alone
