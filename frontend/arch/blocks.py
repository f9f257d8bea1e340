"""What decoders share: the common numbers, embedding, attention, feed-forward, the output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xpuc.frontend.config import Attention, ModelConfig, Reader, Rope, check_attention, read_rope
from xpuc.ir.builder import Graph, Var
from xpuc.ir.formats import dequantize, format_of

MOST_LAYERS, MOST_COLUMNS, MOST_TOKENS = 1 << 10, 1 << 20, 1 << 28  # beyond any real model


def config(
    reader: Reader, tensors: Mapping[str, Any], *, pairing: str, **changes: Any
) -> ModelConfig:
    """The configuration of a plain decoder: layers alike but, where given per layer, in heads."""
    n_layers = reader.count("block_count", MOST_LAYERS)
    d_model = reader.count("embedding_length", MOST_COLUMNS)
    heads = reader.per_layer("attention.head_count", n_layers)
    kv_heads = reader.per_layer("attention.head_count_kv", n_layers, heads[0])
    head_dim = reader.read(int, "attention.key_length", d_model // max(heads[0], 1))
    reader.must_be("attention.value_length", head_dim, head_dim)
    rope = read_rope(reader, head_dim, pairing, frequency_factors(tensors))
    scale = reader.read(float, "attention.scale", head_dim**-0.5)
    softcap = reader.read(float, "attn_logit_softcapping", 0.0)
    layers = tuple(
        Attention(h, kv, head_dim, scale, rope, softcap=softcap)
        for h, kv in zip(heads, kv_heads, strict=True)
    )
    check_attention(reader, layers)
    facts: dict[str, Any] = {
        "arch": reader.arch,
        "n_vocab": int(tensors["token_embd.weight"].shape[0])
        if "token_embd.weight" in tensors
        else 0,
        "d_model": d_model,
        "d_ff": reader.count("feed_forward_length", MOST_COLUMNS),
        "eps": reader.read(float, "attention.layer_norm_rms_epsilon"),
        "context": reader.count("context_length", MOST_TOKENS),
        "layers": layers,
        "logit_softcap": reader.read(float, "final_logit_softcapping", 0.0),
    }
    return ModelConfig(**(facts | changes))


def frequency_factors(tensors: Mapping[str, Any]) -> np.ndarray | None:
    """Llama 3's rope_freqs.weight, f32 (n_rot/2,)."""
    if "rope_freqs.weight" not in tensors:
        return None
    packed = tensors["rope_freqs.weight"]
    return dequantize(format_of(packed.format), packed.data.reshape(1, -1)).reshape(-1)


def rope_tables(g: Graph, cfg: ModelConfig) -> dict[Rope, Var]:
    """One cos | sin table for each different rotary embedding of the layers."""
    positions = g.inputs["positions"]
    return {
        rope: g.op(
            "rope_table", positions, g.constant(rope.inverse_frequencies()), mscale=rope.mscale
        )
        for rope in dict.fromkeys(layer.rope for layer in cfg.layers)
    }


def embed(g: Graph, cfg: ModelConfig) -> Var:
    """The embedding of the step's tokens, (n, d_model)."""
    name = "token_embd.weight"
    table = g.matrix(name, cfg.n_vocab, cfg.d_model)
    return g.op(
        "embed", g.inputs["tokens"], table,
        format=g.tensors[name].format, columns=cfg.d_model, scale=cfg.embedding_scale,
    )  # fmt: skip


def attention(g: Graph, x: Var, i: int, cfg: ModelConfig, table: Var) -> Var:
    """Self-attention of layer i on the normed rows x, with q/k norms if the checkpoint has them."""
    a, blk = cfg.layers[i], f"blk.{i}"
    q = g.linear(x, f"{blk}.attn_q", a.heads * a.head_dim)
    k = g.linear(x, f"{blk}.attn_k", a.kv_heads * a.head_dim)
    v = g.linear(x, f"{blk}.attn_v", a.kv_heads * a.head_dim)
    if g.has(f"{blk}.attn_q_norm.weight"):
        q = g.norm(q, f"{blk}.attn_q_norm", cfg.eps, groups=a.heads)
        k = g.norm(k, f"{blk}.attn_k_norm", cfg.eps, groups=a.kv_heads)
    q = g.op("rope", q, table, heads=a.heads, head_dim=a.head_dim, pairing=a.rope.pairing)
    k = g.op("rope", k, table, heads=a.kv_heads, head_dim=a.head_dim, pairing=a.rope.pairing)
    pools = g.kv_pool(a.kv_heads, a.head_dim, a.window)
    written = g.op("kv_write", k, v, g.index("slots", a.window), *pools)
    index = [g.inputs[name] for name in ("positions", "tiles", "work")]
    index.append(g.index("block_table", a.window))
    out = g.op(
        "attention", q, *(g.item(written, j) for j in range(len(pools))), *index,
        heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim,
        scale=a.scale, window=a.window, softcap=a.softcap, quantize=False,
    )  # fmt: skip
    return g.linear(out, f"{blk}.attn_output", cfg.d_model)


def gated(g: Graph, x: Var, i: int, cfg: ModelConfig, activation: str) -> Var:
    """The gated feed-forward of layer i: down(activation(gate(x)) * up(x))."""
    gate = g.op(activation, g.linear(x, f"blk.{i}.ffn_gate", cfg.d_ff))
    up = g.linear(x, f"blk.{i}.ffn_up", cfg.d_ff)
    return g.linear(g.op("mul", gate, up), f"blk.{i}.ffn_down", cfg.d_model)


def logits(g: Graph, x: Var, cfg: ModelConfig) -> Var:
    """Final norm and output head of the wanted rows; a tied head reads the embedding."""
    x = g.norm(x, "output_norm", cfg.eps)
    if not g.every_row:
        x = g.op("take_rows", x, g.inputs["out_rows"])
    head = "output" if g.has("output.weight") else "token_embd"
    y = g.linear(x, head, cfg.n_vocab)
    return g.op("softcap", y, cap=cfg.logit_softcap) if cfg.logit_softcap else y


def decoder(g: Graph, cfg: ModelConfig, layer: Callable[[Graph, Var, int, Var], Var]) -> Var:
    """Embedding, every layer, the head: logits of the wanted rows."""
    tables = rope_tables(g, cfg)
    x = embed(g, cfg)
    for i, attn in enumerate(cfg.layers):
        x = layer(g, x, i, tables[attn.rope])
    return logits(g, x, cfg)


def pre_norm_layer(g: Graph, x: Var, i: int, cfg: ModelConfig, table: Var) -> Var:
    """A layer of the Llama family: norm, attention, add; norm, SwiGLU, add."""
    h = g.norm(x, f"blk.{i}.attn_norm", cfg.eps)
    x = g.op("add", x, attention(g, h, i, cfg, table))
    h = g.norm(x, f"blk.{i}.ffn_norm", cfg.eps)
    return g.op("add", x, gated(g, h, i, cfg, "silu"))
