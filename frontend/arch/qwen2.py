"""Qwen2 and Qwen2.5: Llama with biases on q, k and v and NeoX rotary pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpuc.frontend.arch import blocks
from xpuc.frontend.config import ModelConfig, Reader
from xpuc.ir.builder import Graph, Var


def config(reader: Reader, tensors: Mapping[str, Any]) -> ModelConfig:
    """The numbers of the model."""
    return blocks.config(reader, tensors, pairing="neox")


def build(g: Graph, cfg: ModelConfig) -> Var:
    """Logits of the wanted rows, (m, n_vocab)."""
    return blocks.decoder(g, cfg, lambda g, x, i, table: blocks.pre_norm_layer(g, x, i, cfg, table))
