"""Tiny random GGUF models of every architecture and feature, with llama.cpp's metadata keys."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_tokenizers import VOCABULARIES, write_vocabulary
from tiny_weights import random_matrix

Keys = Mapping[str, Any]

# Attention then looks at few positions, so that a wrong rotation or mask shows in the logits.
QUERY_GAIN = 2.0
LOGIT_STD = 1.5


@dataclass(frozen=True)
class Tiny:
    """One tiny model. `keys` are more metadata under the architecture's prefix; `weights` may be a
    table of the format of a kind of matrix ("attn_v", "token_embd", …) and of all others ("*")."""

    arch: str
    tokenizer: str = "smollm"
    layers: int = 2
    dim: int = 64
    heads: int = 4
    kv_heads: int | tuple[int, ...] = 2
    head_dim: int = 16
    ffn: int = 160
    context: int = 512
    rope_base: float = 10000.0
    tied: bool = False
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    post_norms: bool = False
    freq_factors: bool = False
    keys: Keys = field(default_factory=dict)
    weights: str | Keys = "F32"
    seed: int = 0
    # Whether llama.cpp computes the same of such a file: a few features it ignores or refuses.
    peer: bool = True

    def kv_heads_of(self, i: int) -> int:
        return self.kv_heads if isinstance(self.kv_heads, int) else self.kv_heads[i]

    def format_of(self, kind: str) -> str:
        if isinstance(self.weights, str):
            return self.weights
        return str(self.weights.get(kind, self.weights["*"]))


def yarn(factor: float, original: int, **more: float) -> dict[str, Any]:
    """The rope.scaling.* keys of a YaRN extension of `original` tokens."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        **{f"rope.scaling.{key}": value for key, value in more.items()},
    }


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
LLAMA = Tiny("llama")
QWEN2 = Tiny("qwen2", "qwen2", biases=("attn_q", "attn_k", "attn_v"), rope_base=1000000.0)
QWEN3 = Tiny("qwen3", "qwen2", head_dim=32, qk_norm=True, tied=True, rope_base=1000000.0)
GEMMA3 = Tiny(
    "gemma3",
    "gemma-spm",
    layers=7,
    kv_heads=1,
    head_dim=32,
    rope_base=1000000.0,
    tied=True,
    qk_norm=True,
    post_norms=True,
    keys={"attention.sliding_window": 8},
)


def vary(row: Tiny, **changes: Any) -> Tiny:
    """`row` with fields replaced; `keys` are added to its own."""
    keys = {**row.keys, **changes.pop("keys", {})}
    return dataclasses.replace(row, keys=keys, **changes)


TINY: dict[str, Tiny] = {
    "llama": LLAMA,
    "llama_spm": vary(LLAMA, tokenizer="llama-spm"),
    "llama_tied": vary(LLAMA, tied=True),
    "llama_linear": vary(LLAMA, keys=LINEAR),
    "llama_freq_factors": vary(LLAMA, head_dim=32, rope_base=500000.0, freq_factors=True),
    "llama_yarn": vary(LLAMA, head_dim=32, rope_base=1000.0, keys=yarn(4.0, 128)),
    "llama_yarn_factor": vary(
        LLAMA, head_dim=32, rope_base=1000.0, keys=yarn(8.0, 64, attn_factor=0.8)
    ),
    "llama_three_heads": vary(LLAMA, dim=96, heads=3, kv_heads=1, head_dim=32),
    "llama_five_heads": vary(LLAMA, dim=160, heads=5, kv_heads=5, head_dim=32),
    "llama_wide_heads": vary(LLAMA, dim=96, heads=5, kv_heads=1, head_dim=32),
    "llama_kv_per_layer": vary(LLAMA, kv_heads=(1, 4), peer=False),
    "llama_biases": vary(LLAMA, biases=("attn_q", "attn_k", "attn_v", "attn_output")),
    "mistral": vary(LLAMA, arch="mistral", tokenizer="llama-spm", peer=False),
    "llama_partial": vary(LLAMA, keys={"rope.dimension_count": 8}, peer=False),
    "llama_scale": vary(LLAMA, keys={"attention.scale": 0.4}, peer=False),
    "llama_softcaps": vary(
        LLAMA, keys={"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}, peer=False
    ),
    "llama_yarn_betas": vary(
        LLAMA,
        head_dim=32,
        rope_base=1000.0,
        keys=yarn(4.0, 512, yarn_beta_fast=8.0, yarn_beta_slow=2.0),
        peer=False,
    ),
    "qwen2": QWEN2,
    "qwen2_yarn": vary(QWEN2, head_dim=16, rope_base=1000.0, keys=yarn(4.0, 128)),
    "qwen2_odd": vary(QWEN2, dim=96, heads=3, kv_heads=3, head_dim=32, tied=True),
    "qwen3": QWEN3,
    "qwen3_linear": vary(QWEN3, keys=LINEAR),
    "qwen3_yarn": vary(QWEN3, rope_base=1000.0, keys=yarn(4.0, 128)),
    "qwen3_odd": vary(QWEN3, dim=96, heads=5, kv_heads=1, tied=False),
    "gemma3": GEMMA3,
    "gemma3_linear": vary(GEMMA3, keys=LINEAR),
    "gemma3_final_cap": vary(GEMMA3, keys={"final_logit_softcapping": 4.0}),
    "gemma3_local_base": vary(GEMMA3, keys={"rope.freq_base_swa": 100.0}),
    "gemma3_pattern": vary(GEMMA3, layers=4, keys={"attention.sliding_window_pattern": 2}),
    "gemma3_no_window": vary(GEMMA3, keys={"attention.sliding_window": 0}),
    "gemma3_partial": vary(GEMMA3, keys={"rope.dimension_count": 16}),
    "gemma3_untied": vary(GEMMA3, tied=False, heads=3, kv_heads=3),
    "gemma3_softcaps": vary(
        GEMMA3,
        keys={"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        peer=False,
    ),
}

# For formats of 256 columns: no row falls back to a narrower format.
WIDE: dict[str, Any] = {"dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512}
# As `llama-quantize` mixes them.
Q4_K_M = {"*": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0"}


def llama3_factors(row: Tiny, extension: float = 8.0, original: int = 256) -> NDArray[np.float32]:
    """What Llama 3.1 divides its frequencies by: long waves most, short ones not."""
    frequency = row.rope_base ** (-np.arange(0, row.head_dim, 2) / row.head_dim)
    turns = original * frequency / (2.0 * math.pi)
    keep = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return (1.0 / ((1.0 - keep) / extension + keep)).astype(np.float32)


def write_metadata(writer: gguf.GGUFWriter, row: Tiny) -> None:
    writer.add_name(f"tiny {row.arch}")
    writer.add_block_count(row.layers)
    writer.add_context_length(row.context)
    writer.add_embedding_length(row.dim)
    writer.add_feed_forward_length(row.ffn)
    writer.add_head_count(row.heads)
    writer.add_head_count_kv(row.kv_heads if isinstance(row.kv_heads, int) else list(row.kv_heads))
    writer.add_key_length(row.head_dim)
    writer.add_value_length(row.head_dim)
    writer.add_layer_norm_rms_eps(1e-6 if row.arch == "gemma3" else 1e-5)
    writer.add_rope_freq_base(row.rope_base)
    writer.add_vocab_size(len(VOCABULARIES[row.tokenizer].tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in row.keys.items():
        key = f"{row.arch}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)


class Tensors:
    """Writes a row's tensors. The numbers of one depend on its name alone, so that models which
    differ in one feature differ in nothing else."""

    def __init__(self, writer: gguf.GGUFWriter, row: Tiny) -> None:
        self.writer = writer
        self.row = row

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.row.seed, zlib.crc32(name.encode())])

    def matrix(self, name: str, shape: tuple[int, int], std: float) -> None:
        """`name` (out, in), and its bias where the row asks for one."""
        kind = name.rsplit(".", 1)[-1]
        packed, dtype = random_matrix(self.rng(name), self.row.format_of(kind), shape, std)
        self.writer.add_tensor(f"{name}.weight", packed, raw_dtype=dtype)
        if kind in self.row.biases:
            bias = self.rng(f"{name}.bias").standard_normal(shape[0]) * 0.5
            self.writer.add_tensor(f"{name}.bias", bias.astype(np.float32))

    def norm(self, name: str, size: int, mean: float = 1.0) -> None:
        weight = mean * (1.0 + 0.2 * self.rng(name).standard_normal(size))
        self.writer.add_tensor(f"{name}.weight", weight.astype(np.float32))

    def layer(self, i: int) -> None:
        row, blk = self.row, f"blk.{i}."
        q_rows, kv_rows = row.heads * row.head_dim, row.kv_heads_of(i) * row.head_dim
        unit = 1.0 / math.sqrt(row.dim)
        self.norm(blk + "attn_norm", row.dim)
        self.matrix(blk + "attn_q", (q_rows, row.dim), QUERY_GAIN * unit)
        self.matrix(blk + "attn_k", (kv_rows, row.dim), unit)
        self.matrix(blk + "attn_v", (kv_rows, row.dim), unit)
        self.matrix(blk + "attn_output", (row.dim, q_rows), 1.0 / math.sqrt(q_rows))
        if row.qk_norm:
            self.norm(blk + "attn_q_norm", row.head_dim, QUERY_GAIN)
            self.norm(blk + "attn_k_norm", row.head_dim)
        self.norm(blk + "ffn_norm", row.dim)
        self.matrix(blk + "ffn_gate", (row.ffn, row.dim), unit)
        self.matrix(blk + "ffn_up", (row.ffn, row.dim), unit)
        self.matrix(blk + "ffn_down", (row.dim, row.ffn), 1.0 / math.sqrt(row.ffn))
        if row.post_norms:
            self.norm(blk + "post_attention_norm", row.dim)
            self.norm(blk + "post_ffw_norm", row.dim)


def write_tiny(name: str, path: Path, **changes: Any) -> Path:
    """Write the model of row `name` of TINY, with fields replaced by `changes`; returns `path`.

    The names of the architectures are rows: write_tiny("llama", path, weights="Q4_0", tied=True).
    """
    row = vary(TINY[name], **changes)
    words = VOCABULARIES[row.tokenizer]
    writer = gguf.GGUFWriter(path, row.arch)
    write_metadata(writer, row)
    write_vocabulary(writer, words)
    tensors = Tensors(writer, row)
    logit_std = LOGIT_STD / math.sqrt(row.dim)
    tensors.matrix("token_embd", (len(words.tokens), row.dim), logit_std)
    tensors.norm("output_norm", row.dim)
    if not row.tied:
        tensors.matrix("output", (len(words.tokens), row.dim), logit_std)
    if row.freq_factors:
        writer.add_tensor("rope_freqs.weight", llama3_factors(row))
    for i in range(row.layers):
        tensors.layer(i)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
