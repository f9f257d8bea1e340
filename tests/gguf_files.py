"""GGUF files for tests: made byte by byte to be wrong in one place, or with the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from xpuc.frontend.ggml_types import SUPPORTED

# A value of every kind, and an array of each; what a reader must give back.
NUMBERS = {
    "uint8": 255,
    "int8": -128,
    "uint16": 65535,
    "int16": -32768,
    "uint32": 2**32 - 1,
    "int32": -(2**31),
    "uint64": 2**64 - 1,
    "int64": -(2**63),
    "float32": 0.15625,
    "float64": 0.1,
    "bool": True,
}
STRING = "naïve 🦙\n"
STRINGS = ["", "a", "Ġthe", "🦙" * 40, "<0x0A>"]


def write_every_kind(path: Path) -> None:
    """A file with every kind of value, every key the reader uses, and every supported type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(32)
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 1)
    writer.add_int32("split.tensors.count", len(SUPPORTED))
    for kind, number in NUMBERS.items():
        value_type = GGUFValueType[kind.upper()]
        writer.add_key_value(f"one.{kind}", number, value_type)
        values = [number, type(number)(0), type(number)(1)]
        writer.add_key_value(f"many.{kind}", values, GGUFValueType.ARRAY, sub_type=value_type)
    writer.add_string("one.string", STRING)
    writer.add_array("many.string", STRINGS)
    random = np.random.default_rng(0)
    for name in SUPPORTED:
        tensor_type = GGMLQuantizationType[name]
        n, n_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        columns = 512 // n if n > 1 else 3
        raw = random.integers(0, 256, (3, columns * n_bytes), dtype=np.uint8)
        writer.add_tensor(f"{name.lower()}.weight", raw, raw_dtype=tensor_type)
    finish(writer)


def write_llama(path: Path, n_layers: int = 30, n_tokens: int = 1500) -> None:
    """The keys and tensor names of SmolLM2, with a small vocabulary and one block a weight."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("SmolLM2 rebuilt small")
    writer.add_context_length(8192)
    writer.add_embedding_length(32)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(32)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"Ġtoken{i}" for i in range(n_tokens)])
    writer.add_token_types([1] * n_tokens)
    writer.add_token_merges([f"Ġto ken{i}" for i in range(n_tokens)])
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    matrix, vector = np.zeros((1, 20), np.uint8), np.ones(32, np.float32)
    writer.add_tensor("token_embd.weight", matrix, raw_dtype=GGMLQuantizationType.Q4_1)
    for layer in range(n_layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", vector)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            name = f"blk.{layer}.{name}.weight"
            writer.add_tensor(name, matrix, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", vector)
    finish(writer)


def write_split(path: Path, n_tensors: int = 5, per_part: int = 2, alignment: int = 32) -> None:
    """A model split into files of `per_part` tensors t0, t1, ..., named after `path`."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_part)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for i in range(n_tensors):
        writer.add_tensor(f"t{i}", np.full(4, i, np.float32))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind_id: int, value: bytes) -> bytes:
    """A metadata entry; its value as it is stored."""
    return text(key) + struct.pack("<I", kind_id) + value


def array(kind_id: int, count: int, values: bytes = b"") -> bytes:
    """The value of an array."""
    return struct.pack("<IQ", kind_id, count) + values


def tensor(name: str | bytes, dimensions: Sequence[int], type_id: int, offset: int = 0) -> bytes:
    """An entry of the tensor directory; dimensions innermost first."""
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", type_id, offset)


def gguf_bytes(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    n_entries: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    data: bytes | None = bytes(256),
) -> bytes:
    """24 bytes of header, then what is given; the counts may lie. Not padded without `data`."""
    n_entries = len(entries) if n_entries is None else n_entries
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head if data is None else head + bytes(-len(head) % 32) + data
