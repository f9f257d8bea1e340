"""The operations of a decoder in numpy, one function each: what kernels are compared with.

Activations are float32, shape (n, d), n = tokens; rope angles and sums of squares are float64.
Written from the papers (RMSNorm, RoFormer, SwiGLU, GQA, YaRN) and what llama.cpp is known to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# Query rows of one score matrix: bounds the memory of a long prefill, not its result.
ATTENTION_ROWS = 256


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer. `scale` is 1/factor; `original` is in tokens."""

    dims: int
    base: float
    neox: bool
    scale: float = 1.0
    attn_factor: float = 1.0
    yarn: float = 0.0  # the extrapolation factor; 0 = plain linear scaling
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """x (n, k) times weight (out, k) transposed, plus bias (out,)."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Over the last axis; gemma's 1 + w is already in the file's weight."""
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return (x * (1.0 / np.sqrt(mean + eps)).astype(np.float32)) * weight


def silu(x: F32) -> F32:
    """x * sigmoid(x), through tanh: no overflow at either end."""
    return x * (np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x))


def gelu_tanh(x: F32) -> F32:
    """The tanh form of gelu (Hendrycks and Gimpel)."""
    inner = np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + np.tanh(inner))


def softcap(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap); cap 0 is no cap."""
    return x if cap == 0.0 else np.float32(cap) * np.tanh(x / np.float32(cap))


def yarn_share(rope: Rope) -> F64:
    """How much of each pair's frequency is left unscaled: (dims / 2,), 1 = all (YaRN §3.2)."""

    def pair_that_turns(times: float) -> float:
        turns = rope.original / (times * 2.0 * math.pi)
        return rope.dims * math.log(turns) / (2.0 * math.log(rope.base))

    low = max(0.0, math.floor(pair_that_turns(rope.beta_fast)))
    high = min(rope.dims - 1.0, math.ceil(pair_that_turns(rope.beta_slow)))
    ramp = (np.arange(rope.dims // 2) - low) / max(0.001, high - low)
    return rope.yarn * (1.0 - np.clip(ramp, 0.0, 1.0))


def rope_frequencies(rope: Rope, factors: F32 | None = None) -> F64:
    """Radians a position of each pair, (dims / 2,), divided by `factors` (Llama 3's rope_freqs)."""
    plain = rope.base ** (-np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims)
    if factors is not None:
        plain = plain / factors
    if rope.yarn == 0.0:
        return plain * rope.scale
    share = yarn_share(rope)
    return plain * rope.scale * (1.0 - share) + plain * share


def rope_magnitude(rope: Rope) -> float:
    """What cos and sin are multiplied by: YaRN's temperature, for extensions only."""
    if rope.yarn == 0.0 or rope.scale >= 1.0:
        return rope.attn_factor
    return rope.attn_factor * (1.0 + 0.1 * math.log(1.0 / rope.scale))


def rotate(x: F32, positions: NDArray[np.int64], rope: Rope, factors: F32 | None = None) -> F32:
    """x (n, heads, head_dim) turned by its positions (n,); dimensions past rope.dims stay."""
    angles = positions[:, None, None] * rope_frequencies(rope, factors)
    magnitude = rope_magnitude(rope)
    cos = (np.cos(angles) * magnitude).astype(np.float32)  # (n, 1, dims / 2)
    sin = (np.sin(angles) * magnitude).astype(np.float32)
    half = rope.dims // 2
    first, second = (
        (slice(0, half), slice(half, rope.dims))
        if rope.neox
        else (slice(0, rope.dims, 2), slice(1, rope.dims, 2))
    )
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def softmax(scores: F32) -> F32:
    """Over the last axis, in place; -inf gives 0."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def attention(q: F32, k: F32, v: F32, *, scale: float, window: int = 0, cap: float = 0.0) -> F32:
    """Causal attention of the last n positions over all N: (n, heads, v_dim).

    q (n, heads, head_dim), k (N, kv_heads, head_dim), v (N, kv_heads, v_dim), n <= N. With a
    window, a position sees itself and the window - 1 before it; 0 = everything before it.
    """
    n, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    group = heads // kv_heads
    out = np.empty((n, heads, v.shape[2]), np.float32)
    for start in range(0, n, ATTENTION_ROWS):
        stop = min(n, start + ATTENTION_ROWS)
        here = np.arange(total - n + start, total - n + stop)[:, None]
        first = max(0, int(here[0, 0]) - window + 1) if window else 0
        last = int(here[-1, 0]) + 1
        seen = np.arange(first, last)[None, :]
        hidden = seen > here
        if window:
            hidden |= seen <= here - window
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            rows = q[start:stop, mine].transpose(1, 0, 2)  # (group, rows, head_dim)
            scores = softcap((rows @ k[first:last, head].T) * np.float32(scale), cap)
            np.copyto(scores, -np.inf, where=hidden)
            out[start:stop, mine] = (softmax(scores) @ v[first:last, head]).transpose(1, 0, 2)
    return out
