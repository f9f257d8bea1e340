"""What is read of a checkpoint's metadata, where reading it wrongly would still give a model."""

from types import SimpleNamespace

import numpy as np
import pytest

from xpuc.errors import FileError, UnsupportedError
from xpuc.frontend.arch import architecture, known
from xpuc.frontend.config import Reader

BASE = {
    "block_count": 6,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
TENSORS = {"token_embd.weight": SimpleNamespace(shape=(300, 64))}


def config(arch="llama", **changes):
    metadata = {f"{arch}.{k}": v for k, v in (BASE | changes).items() if v is not None}
    return architecture(arch, "m.gguf").config(Reader(metadata, arch, "m.gguf"), TENSORS)


def windows(**changes):
    layers = config("gemma3", **{"attention.sliding_window": 16}, **changes).layers
    return [layer.window for layer in layers]


def test_every_sixth_gemma_layer_is_global_unless_the_file_says_otherwise():
    assert windows() == [16, 16, 16, 16, 16, 0]
    assert windows(**{"attention.sliding_window_pattern": 3}) == [16, 16, 0, 16, 16, 0]
    assert windows(**{"attention.sliding_window_pattern": 1}) == [0] * 6
    array = np.array([1, 0, 0, 1, 1, 1], np.bool_)
    assert windows(**{"attention.sliding_window_pattern": array}) == [16, 0, 0, 16, 16, 16]


def test_a_scaling_factor_without_a_type_is_linear():
    rope = config(**{"rope.scaling.factor": 4.0}).layers[0].rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


def test_yarn_below_one_keeps_the_magnitude():
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5}
    assert config(**yarn).layers[0].rope.mscale == 1.0


def test_head_counts_may_differ_by_layer():
    counts = np.array([1, 2, 4, 4, 2, 1], np.int32)
    assert [a.kv_heads for a in config(**{"attention.head_count_kv": counts}).layers] == list(
        counts
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "metadata key llama.block_count is missing"),
        ({"block_count": -1}, "llama.block_count is -1, expected 1 to 1024"),
        ({"block_count": 2**31}, "llama.block_count is 2147483648, expected 1 to 1024"),
        ({"embedding_length": 0}, "llama.embedding_length is 0, expected 1 to"),
        ({"block_count": "six"}, "llama.block_count is 'six', expected int"),
        ({"attention.head_count_kv": 3}, "layer 0 has 4 heads over 3 K/V heads of size 16"),
        ({"attention.head_count_kv": np.array([1, 2])}, "has 2 entries for 6 layers"),
        ({"rope.dimension_count": 7}, "llama.rope.dimension_count is 7, for heads of 16"),
        ({"rope.freq_base": float("nan")}, "llama.rope.freq_base is nan, expected float"),
        ({"attention.value_length": 32}, "attention.value_length is 32"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(changes, message):
    with pytest.raises((FileError, UnsupportedError), match=r"m\.gguf: ") as refused:
        config(**changes)
    assert message in refused.value.message


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedError) as refused:
        architecture("qwen4", "m.gguf")
    assert refused.value.message == "m.gguf: unknown model architecture: 'qwen4'"
    assert all(name in refused.value.hint for name in known())
