"""Checkpoints that have the shapes of models too large to fetch, and no weights: files of holes.

    python tests/bench/shapes.py llama-3-8b llama3-8b.gguf
    xpuc tune llama3-8b.gguf --no-verify
    xpuc compile llama3-8b.gguf --synthetic 1

A tuning session reads shapes and formats alone, and so does a compilation that leaves the weights
out. Formats are those that llama.cpp's quantiser gives each tensor in Q4_K_M.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_tokenizers import NORMAL, bpe, write_vocabulary


@dataclass(frozen=True)
class Shape:
    """What a decoder of the llama family is described by."""

    arch: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    n_vocab: int
    rope_base: float
    has_bias: bool = False


SHAPES = {
    "llama-3-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 500000.0),
    "tiny": Shape("llama", 2, 256, 4, 2, 512, 300, 10000.0),  # of the script's test
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 28, 4, 18944, 152064, 1000000.0, has_bias=True),
}


def main() -> None:
    """Write the file."""
    name, path = sys.argv[1:]
    write(SHAPES[name], name, Path(path))


def write(shape: Shape, name: str, path: Path) -> None:
    """A GGUF file of that shape; its tensors are holes in the file, which read as zeros."""
    writer = gguf.GGUFWriter(path, shape.arch)
    _metadata(writer, shape, name)
    for tensor, rows, columns, kind in tensors(shape):
        _info(writer, tensor, (rows, columns) if rows else (columns,), kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    aligned = -(-path.stat().st_size // 32) * 32
    data = sum(-(-_n_bytes(r or 1, c, k) // 32) * 32 for _, r, c, k in tensors(shape))
    with path.open("r+b") as file:
        file.truncate(aligned + data)


def tensors(shape: Shape) -> list[tuple[str, int, int, Format]]:
    """(name, rows, columns, format) in order; a vector has 0 rows."""
    d, kv = shape.d_model, shape.kv_heads * (shape.d_model // shape.heads)
    found = [("token_embd.weight", shape.n_vocab, d, Format.Q4_K)]
    for layer in range(shape.layers):
        wide = Format.Q6_K if has_more_bits(layer, shape.layers) else Format.Q4_K
        block = [
            ("attn_norm.weight", 0, d, Format.F32),
            ("attn_q.weight", d, d, Format.Q4_K),
            ("attn_k.weight", kv, d, Format.Q4_K),
            ("attn_v.weight", kv, d, wide),
            ("attn_output.weight", d, d, Format.Q4_K),
            ("ffn_norm.weight", 0, d, Format.F32),
            ("ffn_gate.weight", shape.d_ff, d, Format.Q4_K),
            ("ffn_up.weight", shape.d_ff, d, Format.Q4_K),
            ("ffn_down.weight", d, shape.d_ff, wide),
        ]
        if shape.has_bias:
            block += [
                (f"attn_{x}.bias", 0, n, Format.F32)
                for x, n in zip("qkv", (d, kv, kv), strict=True)
            ]
        found += [(f"blk.{layer}.{name}", rows, columns, f) for name, rows, columns, f in block]
    found.append(("output_norm.weight", 0, d, Format.F32))
    found.append(("output.weight", shape.n_vocab, d, Format.Q6_K))
    return found


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether a layer's attn_v and ffn_down are in Q6_K: the first and last eighths, and of those
    between every third."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _metadata(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.d_model)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)
    words = bpe("llama-bpe", specials_first=True)
    fillers = [f"<{n}>" for n in range(len(words.tokens), shape.n_vocab)]
    types = words.types + [NORMAL] * len(fillers)
    write_vocabulary(writer, replace(words, tokens=words.tokens + fillers, types=types))


def _info(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Format) -> None:
    dtype: Any = np.dtype(np.float32) if kind is Format.F32 else np.dtype(np.uint8)
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    size = _n_bytes(rows, columns, kind)
    packed = (*shape[:-1], size // rows) if dtype == np.uint8 else shape
    writer.add_tensor_info(name, packed, dtype, size, raw_dtype=kind)


def _n_bytes(rows: int, columns: int, kind: Format) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return rows * columns // block * size


if __name__ == "__main__":
    main()
