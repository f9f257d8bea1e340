"""The whole forward of a GGUF model in numpy float32: the oracle, written apart from the product.

It shares nothing with xpuc: the file is read and its weights are widened by the `gguf` package, and
activations are never quantised. Weights are widened once, when first used, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_reader import Reader
from numpy.typing import NDArray
from reference_ops import (
    F32,
    Rope,
    attention,
    gelu_tanh,
    linear,
    rms_norm,
    rotate,
    silu,
    softcap,
)

ALIASES = {"mistral": "llama", "smollm": "llama", "smollm2": "llama", "tinyllama": "llama"}
KNOWN = ("llama", "qwen2", "qwen3", "gemma3")
GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1 / sqrt(head_dim)


@dataclass(frozen=True)
class Layer:
    """What one layer's attention needs to know."""

    heads: int
    kv_heads: int
    rope: Rope
    window: int  # 0 = sees everything before it


@dataclass(frozen=True)
class Facts:
    """A model's numbers, read from its metadata."""

    family: str
    layers: tuple[Layer, ...]
    d_model: int
    key_dim: int
    value_dim: int
    eps: float
    attention_scale: float
    attention_cap: float
    final_cap: float
    embedding_scale: float
    logit_scale: float


class Metadata:
    """The fields of a GGUF file under its architecture's prefix."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self.fields = reader.fields
        self.arch = str(self.fields["general.architecture"].contents())

    def read(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(f"{self.arch}.{key}")
        if field is not None:
            return field.contents()
        if default is None:
            raise KeyError(f"{self.arch}.{key} is missing")
        return default

    def per_layer(self, key: str, n_layers: int, default: Any = None) -> list[Any]:
        """A value of each layer, whether the file says one number or an array."""
        value = self.read(key, default)
        return list(value) if isinstance(value, list) else [value] * n_layers


def is_local(pattern: Any, i: int) -> bool:
    """Whether layer i has the window: a pattern is an array, or n where every n-th is global."""
    if isinstance(pattern, list):
        return bool(pattern[i])
    return int(pattern) == 0 or (i + 1) % int(pattern) != 0


def read_rope(meta: Metadata, family: str, key_dim: int) -> tuple[Rope, Rope]:
    """The rotary embedding of global and of local layers."""
    kind = meta.read("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r}")
    factor = 0.0
    if kind != "none":
        factor = meta.read("rope.scaling.factor", meta.read("rope.scale_linear", 0.0))
    everywhere = Rope(
        dims=meta.read("rope.dimension_count", key_dim),
        base=meta.read("rope.freq_base", 10000.0),
        neox=family != "llama",
        scale=1.0 / factor if factor else 1.0,
        attn_factor=meta.read("rope.scaling.attn_factor", 1.0),
        yarn=meta.read("rope.scaling.yarn_ext_factor", 1.0) if kind == "yarn" else 0.0,
        original=meta.read("rope.scaling.original_context_length", meta.read("context_length")),
        beta_fast=meta.read("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.read("rope.scaling.yarn_beta_slow", 1.0),
    )
    local_base = meta.read("rope.freq_base_swa", meta.read("rope.local.freq_base", 10000.0))
    # Local layers never see far enough to need scaling.
    local = Rope(everywhere.dims, local_base, everywhere.neox, attn_factor=everywhere.attn_factor)
    return everywhere, local


def read_layers(meta: Metadata, family: str, key_dim: int) -> tuple[Layer, ...]:
    n_layers = meta.read("block_count")
    heads = meta.per_layer("attention.head_count", n_layers)
    kv_heads = meta.per_layer("attention.head_count_kv", n_layers, heads)
    window = meta.read("attention.sliding_window", 0) if family == "gemma3" else 0
    pattern = meta.read("attention.sliding_window_pattern", 6)
    everywhere, local = read_rope(meta, family, key_dim)
    return tuple(
        Layer(h, kv, local, window)
        if window and is_local(pattern, i)
        else Layer(h, kv, everywhere, 0)
        for i, (h, kv) in enumerate(zip(heads, kv_heads, strict=True))
    )


def read_facts(meta: Metadata) -> Facts:
    family = ALIASES.get(meta.arch, meta.arch)
    if family not in KNOWN:
        raise ValueError(f"the reference knows {', '.join(KNOWN)}, not {meta.arch}")
    d_model = meta.read("embedding_length")
    first_heads = meta.per_layer("attention.head_count", 1)[0]
    key_dim = meta.read("attention.key_length", d_model // first_heads)
    layers = read_layers(meta, family, key_dim)
    gemma = family == "gemma3"
    scaled_dim = d_model // first_heads if gemma and len(layers) == GEMMA3_27B_LAYERS else key_dim
    return Facts(
        family=family,
        layers=layers,
        d_model=d_model,
        key_dim=key_dim,
        value_dim=meta.read("attention.value_length", d_model // first_heads),
        eps=meta.read("attention.layer_norm_rms_epsilon"),
        attention_scale=meta.read("attention.scale", 0.0) or 1.0 / math.sqrt(scaled_dim),
        attention_cap=meta.read("attn_logit_softcapping", 0.0),
        final_cap=meta.read("final_logit_softcapping", 0.0),
        embedding_scale=meta.read("embedding_scale", math.sqrt(d_model) if gemma else 1.0),
        logit_scale=meta.read("logit_scale", 1.0),
    )


class Weights:
    """The file's tensors as float32, each widened when first asked for."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self.packed = {tensor.name: tensor for tensor in reader.tensors}
        self.wide: dict[str, F32] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.packed

    def __getitem__(self, name: str) -> F32:
        if name not in self.wide:
            tensor = self.packed[name]
            shape = tuple(int(size) for size in reversed(tensor.shape))
            wide = gguf.dequantize(tensor.data, tensor.tensor_type)
            self.wide[name] = np.ascontiguousarray(wide, dtype=np.float32).reshape(shape)
        return self.wide[name]

    def may(self, name: str) -> F32 | None:
        """The tensor, or None where the file has none."""
        if name not in self:
            return None
        return self[name]


class Reference:
    """A model. `forward` reads a whole prompt; `session` keeps keys and values between steps."""

    def __init__(self, path: Path | str) -> None:
        reader = Reader(path)
        self.facts = read_facts(Metadata(reader))
        self.weights = Weights(reader)
        self.vocab = int(self.weights.packed["token_embd.weight"].shape[1])

    def forward(
        self,
        ids: Sequence[int],
        *,
        rows: slice | None = None,
        layer_outputs: list[F32] | None = None,
    ) -> F32:
        """Logits (n, vocab) of every position, or of `rows`; row i predicts what follows ids[i]."""
        return self.session().step(ids, rows=rows, layer_outputs=layer_outputs)

    def session(self) -> Session:
        return Session(self)

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """The n likeliest ids, each read before the next; an end of text does not stop it."""
        session = self.session()
        logits = session.step(ids, rows=slice(-1, None))
        chosen = [int(logits[-1].argmax())]
        while len(chosen) < n:
            chosen.append(int(session.step([chosen[-1]])[-1].argmax()))
        return chosen


class Session:
    """One sequence: what it read stays in `keys` and `values`, (n_past, kv_heads, dim) a layer."""

    def __init__(self, model: Reference) -> None:
        facts = model.facts
        self.model = model
        self.n_past = 0
        self.keys = [np.empty((0, x.kv_heads, facts.key_dim), np.float32) for x in facts.layers]
        self.values = [np.empty((0, x.kv_heads, facts.value_dim), np.float32) for x in facts.layers]

    def step(
        self,
        ids: Sequence[int],
        *,
        rows: slice | None = None,
        layer_outputs: list[F32] | None = None,
    ) -> F32:
        """Read ids after what was read before: logits (n, vocab), or of `rows` of the n only."""
        facts, weights = self.model.facts, self.model.weights
        tokens = np.asarray(ids, np.int64)
        positions = np.arange(self.n_past, self.n_past + len(tokens))
        x = weights["token_embd.weight"][tokens] * np.float32(facts.embedding_scale)
        for i in range(len(facts.layers)):
            x = x + self.attend(i, x, positions)
            x = x + self.feed_forward(i, x)
            if layer_outputs is not None:
                layer_outputs.append(x)
        self.n_past += len(tokens)
        return self.head(x if rows is None else x[rows])

    def project(self, x: F32, name: str) -> F32:
        weights = self.model.weights
        return linear(x, weights[f"{name}.weight"], weights.may(f"{name}.bias"))

    def norm(self, x: F32, name: str, *, optional: bool = False) -> F32:
        weight = self.model.weights.may(f"{name}.weight")
        if weight is None:
            assert optional, f"{name}.weight is missing"
            return x
        return rms_norm(x, weight, self.model.facts.eps)

    def attend(self, i: int, x: F32, positions: NDArray[np.int64]) -> F32:
        facts, layer, blk = self.model.facts, self.model.facts.layers[i], f"blk.{i}."
        factors = self.model.weights.may("rope_freqs.weight")
        h = self.norm(x, blk + "attn_norm")
        q = self.project(h, blk + "attn_q").reshape(-1, layer.heads, facts.key_dim)
        k = self.project(h, blk + "attn_k").reshape(-1, layer.kv_heads, facts.key_dim)
        v = self.project(h, blk + "attn_v").reshape(-1, layer.kv_heads, facts.value_dim)
        q = rotate(self.norm(q, blk + "attn_q_norm", optional=True), positions, layer.rope, factors)
        k = rotate(self.norm(k, blk + "attn_k_norm", optional=True), positions, layer.rope, factors)
        self.keys[i] = np.concatenate([self.keys[i], k])
        self.values[i] = np.concatenate([self.values[i], v])
        seen = attention(
            q,
            self.keys[i],
            self.values[i],
            scale=facts.attention_scale,
            window=layer.window,
            cap=facts.attention_cap,
        )
        out = self.project(seen.reshape(len(x), -1), blk + "attn_output")
        return self.norm(out, blk + "post_attention_norm", optional=True)

    def feed_forward(self, i: int, x: F32) -> F32:
        blk = f"blk.{i}."
        activation = gelu_tanh if self.model.facts.family == "gemma3" else silu
        h = self.norm(x, blk + "ffn_norm")
        gated = activation(self.project(h, blk + "ffn_gate")) * self.project(h, blk + "ffn_up")
        return self.norm(
            self.project(gated, blk + "ffn_down"), blk + "post_ffw_norm", optional=True
        )

    def head(self, x: F32) -> F32:
        facts = self.model.facts
        # A file without output.weight ties the head to the embedding.
        name = "output" if "output.weight" in self.model.weights else "token_embd"
        logits = self.project(self.norm(x, "output_norm"), name)
        if facts.logit_scale != 1.0:
            logits = logits * np.float32(facts.logit_scale)
        return softcap(logits, facts.final_cap)
