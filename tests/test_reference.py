"""The oracle: against recorded float32 outputs, against llama.cpp, and against itself."""

from __future__ import annotations

import gguf
import numpy as np
import peer
import pytest
import reference_ops as ops
from compare import (
    agreement,
    forced_ids,
    forced_rows,
    kl_full,
    kl_top10,
    log_softmax,
    relative_error,
)
from reference import Reference
from tiny_models import Q4_K_M, TINY, WIDE
from tiny_weights import FORMATS

IDS = [5 + (i * 37) % 250 for i in range(40)]
REAL = ["smollm2", "gemma3"]

# The base a feature is measured against: the same numbers, without the feature.
FEATURES = {
    "llama_linear": {"keys": {"rope.scaling.factor": 1.0}},
    "llama_freq_factors": {"freq_factors": False},
    "llama_yarn": {"keys": {"rope.scaling.type": "linear"}},
    "llama_yarn_factor": {"keys": {"rope.scaling.attn_factor": 1.0}},
    "llama_yarn_betas": {"keys": {"rope.scaling.yarn_beta_fast": 32.0}},
    "llama_biases": {"biases": ("attn_q", "attn_k", "attn_v")},
    "llama_partial": {"keys": {"rope.dimension_count": 16}},
    "llama_scale": {"keys": {"attention.scale": 0.25}},
    "llama_softcaps": {"keys": {"attn_logit_softcapping": 0.0}},
    "qwen2": {"biases": ()},
    "qwen3": {"qk_norm": False},
    "gemma3": {"keys": {"attention.sliding_window": 9}},
    "gemma3_linear": {"keys": {"rope.scaling.factor": 1.0}},
    "gemma3_final_cap": {"keys": {"final_logit_softcapping": 0.0}},
    "gemma3_local_base": {"keys": {"rope.freq_base_swa": 10000.0}},
    "gemma3_pattern": {"keys": {"attention.sliding_window_pattern": 3}},
    "gemma3_partial": {"keys": {"rope.dimension_count": 32}},
}


@pytest.fixture(scope="module", params=REAL)
def real(request, golden):
    """A real model and what is recorded of it."""
    model = request.getfixturevalue(f"{request.param}_reference")
    return model, golden(f"{request.param}.json")


@pytest.mark.model
@pytest.mark.slow
def test_real_model_gives_the_recorded_float32_outputs(real):
    model, recorded = real
    for name, prompt in recorded["prompts"].items():
        f32 = prompt["f32"]
        read = forced_ids(prompt["token_ids"], f32["greedy_ids"])
        logprobs = log_softmax(model.forward(read, rows=slice(-len(f32["greedy_ids"]), None)))
        apart = [
            abs(row[token] - recorded_logprob)
            for row, top in zip(logprobs, f32["top10"], strict=True)
            for token, recorded_logprob in top
        ]
        # Summed in another order, logits of up to 30 differ in their last bits.
        assert max(apart) < 1e-3, name
        assert kl_top10(f32["top10"], logprobs).mean() < 1e-6, name
        found = agreement(f32["greedy_ids"], f32["margin"], logprobs.argmax(-1))
        assert found.holds(0.001), (name, found)


@pytest.mark.model
@pytest.mark.slow
def test_real_model_past_its_window_step_by_step(gemma3_reference):
    model = gemma3_reference
    window = max(layer.window for layer in model.facts.layers)
    assert window == 512
    ids = [2, *(1000 + (i * 7919) % 60000 for i in range(window + 60))]
    whole = model.forward(ids, rows=slice(-8, None))
    session = model.session()
    session.step(ids[:400], rows=slice(-1, None))
    session.step(ids[400:-8], rows=slice(-1, None))
    steps = np.concatenate([session.step([token]) for token in ids[-8:]])
    assert kl_full(whole, steps).max() < 1e-6


@pytest.mark.parametrize("name", TINY)
def test_steps_equal_one_prefill(name, tiny_model):
    model = Reference(tiny_model(name))
    whole = model.forward(IDS)
    session = model.session()
    pieces = [session.step(IDS[:7]), *(session.step([token]) for token in IDS[7:12])]
    pieces += [session.step(IDS[12:31], rows=slice(-1, None)), session.step(IDS[31:])]
    steps = np.concatenate(pieces)
    assert whole.shape == (len(IDS), model.vocab)
    assert whole.dtype == np.float32
    assert relative_error(whole[[*range(12), 30, *range(31, 40)]], steps) < 1e-5


@pytest.mark.parametrize("name", TINY)
def test_tiny_logits_spread_over_a_few_units(name, tiny_model):
    logits = Reference(tiny_model(name)).forward(IDS)
    assert 0.5 < logits.std() < 3.0
    assert np.abs(logits).max() < 15.0


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_shows_in_the_logits(name, tiny_model):
    # Else a product that ignores the feature would pass the tests that compare logits.
    given = Reference(tiny_model(name)).forward(IDS)
    without = Reference(tiny_model(name, **FEATURES[name])).forward(IDS)
    assert relative_error(given, without) > 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_tiny_weights_have_the_asked_spread(name, tiny_model):
    path = tiny_model("llama", weights=name, **WIDE)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert {kinds[f"blk.0.{x}.weight"] for x in ("attn_v", "attn_output", "ffn_down")} == {name}
    weight = Reference(path).weights["blk.0.attn_v.weight"]
    assert weight.std() * np.sqrt(weight.shape[1]) == pytest.approx(1.0, rel=0.02)
    assert abs(weight.mean()) < 0.1 * weight.std()


def test_a_mixture_of_formats_falls_back_where_rows_are_narrow(tiny_model):
    tensors = gguf.GGUFReader(tiny_model("llama", weights=Q4_K_M, dim=256, ffn=96)).tensors
    kinds = {t.name.removesuffix(".weight"): t.tensor_type.name for t in tensors}
    assert kinds["token_embd"] == "Q8_0"
    assert kinds["output"] == "Q4_K"
    assert kinds["blk.1.attn_v"] == "Q6_K"
    assert kinds["blk.1.attn_output"] == "Q5_0"  # 64 columns
    assert kinds["blk.1.ffn_down"] == "Q8_0"  # 96 columns, asked for Q6_K


def test_layer_outputs_are_the_residual_stream(tiny_model):
    model = Reference(tiny_model("llama"))
    outputs = []
    logits = model.forward(IDS, layer_outputs=outputs)
    assert [x.shape for x in outputs] == [(len(IDS), 64)] * 2
    normed = ops.rms_norm(outputs[-1], model.weights["output_norm.weight"], model.facts.eps)
    np.testing.assert_allclose(normed @ model.weights["output.weight"].T, logits, rtol=1e-6)


def test_greedy_is_what_forward_says(tiny_model):
    model = Reference(tiny_model("qwen2"))
    chosen = model.greedy(IDS[:5], 6)
    logits = forced_rows(model.forward(forced_ids(IDS[:5], chosen)), IDS[:5])
    assert logits.argmax(-1).tolist() == chosen


def test_an_unknown_architecture_is_refused(tiny_model):
    with pytest.raises(ValueError, match="not falcon"):
        Reference(tiny_model("llama", arch="falcon"))


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.skipif(peer.available() is None, reason=peer.MISSING)
@pytest.mark.parametrize("name", [name for name, row in TINY.items() if row.peer])
def test_llama_cpp_computes_the_same(name, tiny_model):
    path = tiny_model(name)
    model = Reference(path)
    apart = log_softmax(model.forward(IDS)) - peer.logprobs(path, IDS, vocab=model.vocab)
    # llama.cpp's gelu is a table of float16: with a gelu of that kind here, 1e-5 too.
    assert np.abs(apart).max() < (2e-2 if name.startswith("gemma3") else 1e-4)


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.skipif(peer.available() is None, reason=peer.MISSING)
@pytest.mark.parametrize("name", FORMATS)
def test_llama_cpp_reads_every_format_alike(name, tiny_model):
    path = tiny_model("llama", weights=name, **WIDE)
    model = Reference(path)
    found = peer.logprobs(path, IDS, vocab=model.vocab)
    # It quantises activations to 8 bits, over 256 columns for some formats.
    assert kl_full(model.forward(IDS), found).mean() < 0.01
