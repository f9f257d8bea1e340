"""Gemma 3: scaled embedding, norms around each block, q/k norms, five local layers to a global."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xpuc.frontend.arch import blocks
from xpuc.frontend.config import ModelConfig, Reader
from xpuc.ir.builder import Graph, Var

PATTERN = 6  # every sixth layer sees the whole context


def config(reader: Reader, tensors: Mapping[str, Any]) -> ModelConfig:
    """The numbers of the model; local layers have a window and a rotary base of their own."""
    cfg = blocks.config(reader, tensors, pairing="neox")
    window = reader.read(int, "attention.sliding_window", 0)
    pattern = reader.read(int, "attention.sliding_window_pattern", PATTERN)
    local_base = reader.read(float, "rope.freq_base_swa", 10000.0)

    def local(i: int) -> bool:
        return window > 0 and (i + 1) % pattern != 0

    layers = tuple(
        dataclasses.replace(
            layer,
            window=window,
            rope=dataclasses.replace(layer.rope, base=local_base, scaling="none"),
        )
        if local(i)
        else layer
        for i, layer in enumerate(cfg.layers)
    )
    return dataclasses.replace(cfg, layers=layers, embedding_scale=cfg.d_model**0.5)


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
