"""Every architecture and feature, compiled and run, against the numpy forward."""

from __future__ import annotations

import functools

import gguf
import numpy as np
import peer
import pytest
from compare import kl_full, log_softmax, logit_agreement, relative_error
from reference import Reference
from stepping import in_chunks, row_by_row
from tiny_models import Q4_K_M, TINY, WIDE
from tiny_weights import FORMATS

pytestmark = pytest.mark.slow

IDS = [5 + (i * 37) % 250 for i in range(150)]  # past every window, and into a second segment
EXACT = {"activations": "f32", "kv": "f32"}
SMALL = {"ctx": 160, "max_chunk": 64, "max_batch": 1}
# Features are tested without LLVM's optimisations; the four architectures with them, in int8 (and
# so by test_batching, whose kernels these are).
OPTIMISED = ("llama", "qwen2", "qwen3", "gemma3")
# Two local layers and a global one do for a feature; gemma3 itself has five to one, as it says.
SHORT = {"layers": 3, "keys": {"attention.sliding_window_pattern": 2}}

# Between them all formats, in groups of one format and of several.
MIXTURES = {
    "llama": {
        "token_embd": "Q6_K", "output": "Q5_K", "attn_q": "Q2_K", "attn_k": "Q2_K",
        "attn_v": "Q3_K", "attn_output": "IQ4_XS", "ffn_down": "Q4_K", "*": "IQ4_NL",
    },
    "qwen2": {
        "token_embd": "Q4_0", "output": "F16", "attn_q": "Q4_1", "attn_k": "Q5_1", "attn_v": "Q5_0",
        "attn_output": "BF16", "ffn_gate": "Q8_0", "ffn_up": "F32", "*": "Q5_1",
    },
    "gemma3": Q4_K_M,
}  # fmt: skip
LAYERS = {
    "llama": {},
    "qwen2": {},
    "gemma3": {"layers": 2, "keys": {"attention.sliding_window_pattern": 2}},
}


def row(name: str) -> dict:
    """The row's weights, and fewer layers than Gemma's where they are not what is tested."""
    is_long = name.startswith("gemma3_") and name != "gemma3_pattern"
    return {"weights": "Q8_0", **(SHORT if is_long else {})}


def mixture(name: str) -> dict:
    return {"weights": MIXTURES[name], **WIDE, **(SHORT if name == "gemma3" else {})}


@functools.cache
def wanted(path) -> np.ndarray:
    """The reference's logits."""
    return Reference(path).forward(IDS)


def every_way(model) -> dict[str, np.ndarray]:
    """The logits of a prompt read in chunks, and of one read row by row."""
    return {"prefill": in_chunks(model, IDS, [64]), "decode": row_by_row(model, IDS)}


def greedy_ids(model) -> dict[str, np.ndarray]:
    """The same of the entry points that give ids."""
    return {
        "prefill": in_chunks(model, IDS, [64], tail="greedy"),
        "decode": row_by_row(model, IDS, tail="greedy"),
    }


def check_exact(model, path) -> None:
    greedy = greedy_ids(model)
    for way, logits in every_way(model).items():
        # The issue asks for 1e-3; what is left here is the order of summation.
        assert relative_error(wanted(path), logits) < 3e-5, way
        np.testing.assert_array_equal(greedy[way], logits.argmax(-1), err_msg=way)


def check_quantised(model, path) -> None:
    greedy = greedy_ids(model)
    for way, logits in every_way(model).items():
        assert kl_full(wanted(path), logits).mean() <= 0.005, way
        assert relative_error(wanted(path), logits) > 1e-4, "nothing was quantised"
        assert logit_agreement(wanted(path), logits).holds(0.3), way
        np.testing.assert_array_equal(greedy[way], logits.argmax(-1), err_msg=way)


@pytest.mark.parametrize("name", TINY)
def test_the_float32_build_gives_the_references_logits(name, tiny_model, loaded):
    path = tiny_model(name, **row(name))
    check_exact(loaded(path, **SMALL, **EXACT, plainly=True), path)


@pytest.mark.parametrize("name", TINY)
def test_the_int8_build_stays_close_to_the_reference(name, tiny_model, loaded):
    path = tiny_model(name, **row(name))
    check_quantised(loaded(path, **SMALL, plainly=name not in OPTIMISED), path)


@pytest.mark.parametrize(
    ("name", "no_fuse"),
    [
        ("gemma3_softcaps", ()),
        ("llama_three_heads", ()),
        ("qwen3", ("fuse_rope_kv",)),  # K/V written by the target-free kernel
    ],
)
def test_keys_and_values_in_q8_0_stay_close_to_the_reference(name, no_fuse, tiny_model, loaded):
    path = tiny_model(name, **row(name))
    options = {"activations": "f32", "kv": "q8_0", "no_fuse": no_fuse}
    check_quantised(loaded(path, **SMALL, **options, plainly=True), path)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_formats_in_float32(name, tiny_model, loaded):
    path = tiny_model(name, **mixture(name))
    check_exact(loaded(path, **SMALL, **EXACT, plainly=True), path)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_formats_in_int8(name, tiny_model, loaded):
    path = tiny_model(name, **mixture(name))
    check_quantised(loaded(path, **SMALL, plainly=True), path)


def test_the_mixtures_hold_every_format(tiny_model):
    paths = [tiny_model(name, **mixture(name)) for name in MIXTURES]
    kinds = {t.tensor_type.name for path in paths for t in gguf.GGUFReader(path).tensors}
    assert kinds == set(FORMATS)


@pytest.mark.peer
@pytest.mark.skipif(peer.available() is None, reason=peer.MISSING)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_llama_cpp_gives_the_same_logprobs(name, tiny_model, loaded):
    path = tiny_model(name)  # in float32: llama.cpp quantises activations of any other model
    model = loaded(path, **SMALL, **EXACT, plainly=True)
    found = peer.logprobs(path, IDS, vocab=model.n_vocab)
    apart = log_softmax(in_chunks(model, IDS, [64])) - found
    # llama.cpp's gelu is a table of float16.
    assert np.abs(apart).max() < (2e-2 if name == "gemma3" else 1e-4)
