"""Gemma 3: scaled embedding, norms around each block, q/k norms, five local layers to a global."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xpuc.frontend.arch import blocks
from xpuc.frontend.config import ModelConfig, Reader
from xpuc.ir.builder import Graph, Var

PATTERN = 6  # every sixth layer sees the whole context
LAYERS_27B = 62  # the one size that scales scores by the embedding width over the heads


def config(reader: Reader, tensors: Mapping[str, Any]) -> ModelConfig:
    """The numbers of the model; local layers have a window and a rotary base of their own."""
    cfg = blocks.config(reader, tensors, pairing="neox")
    window = reader.read(int, "attention.sliding_window", 0)
    pattern = reader.per_layer("attention.sliding_window_pattern", cfg.n_layers, PATTERN)
    is_array = reader.is_array("attention.sliding_window_pattern")
    local_base = reader.read(float, "rope.freq_base_swa", 10000.0)

    def local(i: int) -> bool:
        # An array says of each layer whether it is local; a number n, that every n-th is not.
        n = pattern[i]
        return window > 0 and (bool(n) if is_array else n == 0 or (i + 1) % n != 0)

    layers = []
    for i, layer in enumerate(cfg.layers):
        if cfg.n_layers == LAYERS_27B and not reader.has("attention.scale"):
            layer = dataclasses.replace(layer, scale=(cfg.d_model / layer.heads) ** -0.5)
        if local(i):
            rope = dataclasses.replace(layer.rope, base=local_base, scaling="none")
            layer = dataclasses.replace(layer, window=window, rope=rope)
        layers.append(layer)
    return dataclasses.replace(cfg, layers=tuple(layers), embedding_scale=cfg.d_model**0.5)


def build(g: Graph, cfg: ModelConfig) -> Var:
    """Logits of the wanted rows, (m, n_vocab)."""

    def layer(g: Graph, x: Var, i: int, table: Var) -> Var:
        h = g.norm(x, f"blk.{i}.attn_norm", cfg.eps)
        h = blocks.attention(g, h, i, cfg, table)
        x = g.op("add", x, g.norm(h, f"blk.{i}.post_attention_norm", cfg.eps))
        h = g.norm(x, f"blk.{i}.ffn_norm", cfg.eps)
        h = blocks.gated(g, h, i, cfg, "gelu_tanh")
        return g.op("add", x, g.norm(h, f"blk.{i}.post_ffw_norm", cfg.eps))

    return blocks.decoder(g, cfg, layer)
