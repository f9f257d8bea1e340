"""The artifact: the contract between the compiler that writes it and the runtime that loads it.

model.xpuc/
  manifest.json         what a loader decides by, and the bytes and digest of every other file
  model.so              the compiled entry points
  weights.safetensors   packed planes, each 64-byte aligned in the file; not of synthetic weights
  tokenizer.json        for the `tokenizers` library
  chat_template.jinja   where the checkpoint has one
  lib/                  the TVM runtime libraries model.so was built against, and their licence
  reports/              what the compiler decided and measured, for people
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from xpuc.errors import ArtifactError

FORMAT_VERSION = 6
MANIFEST, LIBRARY, WEIGHTS = "manifest.json", "model.so", "weights.safetensors"
TOKENIZER, CHAT_TEMPLATE, RUNTIME = "tokenizer.json", "chat_template.jinja", "lib/libtvm_runtime.so"
CUDA_RUNTIME = "lib/libtvm_runtime_cuda.so"
TOP_K = 64  # tokens that a sampled entry point keeps at most
BANNED = 8  # ids that a row of it excludes at most
KV_GROUP = 32  # columns of a key or value that share a scale in q8_0
_CHUNK = 1 << 24  # bytes read at once for a digest
_DIGEST, _END = ',\n "digest": ', "\n}\n"  # how the manifest's text ends


# Extensions that LLVM uses by itself or that kernels ask for: its name -> that in /proc/cpuinfo.
CPU_FEATURES = {
    "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "popcnt": "popcnt", "lzcnt": "abm",
    "movbe": "movbe", "bmi": "bmi1", "bmi2": "bmi2", "gfni": "gfni",
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512vnni": "avx512_vnni",
    "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2", "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq", "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
}  # fmt: skip
# GPU architectures that code can be made for, by NVIDIA's names, the oldest first; `a` at the end:
# for GPUs of that compute capability alone.
GPU_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


Tail = Literal["logits", "greedy", "sampled"]  # what a step ends in
# Of the names of entry points.
SUFFIXES: dict[Tail, str] = {"logits": "", "greedy": "_greedy", "sampled": "_sampled"}


@dataclass(frozen=True)
class EntryPoint:
    """A function of model.so.

    rows    its number of tokens, 0 for any number up to max_chunk
    tail    what it gives of each wanted row: logits, or the id that is chosen: the likeliest, or as
            the row's options say (see Sampling)
    copies  whether it takes the int8 copies after the planes
    arch    the GPU architecture it is for, in place of the one for all; or none
    """

    name: str
    kind: str  # decode | prefill
    rows: int
    tail: Tail
    copies: bool = False
    arch: str = ""


class Sampling(NamedTuple):
    """How a sampled step chooses a token of a row of logits: with a random number u in [0, 1) and
    the ids that are not to be chosen a row of its index input `sampling`.

    top_p        from 1 up: off
    temperature  0: greedy, and of the other fields only `top_k` counts, which is to be 1
    min_p        the logarithm of it; -inf: off
    top_k        from 1 to `TOP_K`

    The samplers run in the order top_k, top_p, min_p, temperature. A row gives -1 where a logit is
    NaN and, unless it is greedy, where the largest is infinite.
    """

    top_p: float
    temperature: float
    min_p: float
    top_k: int

    def write(self, rows: memoryview, row: int, u: float, banned: Sequence[int]) -> None:
        """Into one of the rows; at most `BANNED` ids."""
        ids = (*banned, *_NOBODY[len(banned) :])
        _SAMPLING_ROW.pack_into(rows, row * _SAMPLING_ROW.size, u, *self, *ids)


# Of a row, in order: (name, dtype, place in elements of that dtype).
SAMPLING_FIELDS = (
    ("u", "float64", 0),
    ("top_p", "float64", 1),
    ("temperature", "float32", 4),
    ("min_p", "float32", 5),
    ("top_k", "int32", 6),
)
SAMPLING_BANNED = 8  # the place of the first of the banned ids, int32; -1: none
_NOBODY = (-1,) * BANNED
_SAMPLING_ROW = struct.Struct(f"=ddffi4x{BANNED}i")
SAMPLING_WORDS = _SAMPLING_ROW.size // 4  # int32 of a row


@dataclass(frozen=True)
class Plane:
    """One array of the weight file and an operand of every entry point, in this order."""

    name: str
    dtype: str
    size: int  # elements


Range = tuple[float, float]


@dataclass(frozen=True)
class Synthetic:
    """Weights that are in no file: a load makes them up from the seed.

    `ranges` has one for each of the manifest's planes: what its elements are drawn from, both ends
    included; None: any bits. Speed and memory are those of the model, answers mean nothing.
    """

    seed: int
    ranges: tuple[Range | None, ...]

    def __str__(self) -> str:
        return f"synthetic weights (seed {self.seed})"


@dataclass(frozen=True)
class Copy:
    """An int8 copy of a matrix, which a load makes on the device and prompts are multiplied with.

    name   the tensor's
    entry  the function of model.so that makes it of the `planes` named: int8 (size,)
    """

    name: str
    entry: str
    size: int  # elements, which are bytes
    planes: tuple[str, ...]


def windows_of(layers: Iterable[int]) -> tuple[int, ...]:
    """The windows of groups of layers, of the windows of layers: each once, 0 (all) first.

    Layers of one window are a group: their K/V is in blocks of their own, which slots and block
    tables of their own name.
    """
    return tuple(sorted(set(layers)))


@dataclass(frozen=True)
class PoolArray:
    """One of the arrays that hold the K/V of a layer; `shape` is that of a block of the pool."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def block_bytes(self) -> int:
        size = {"int8": 1, "float16": 2, "float32": 4}[self.dtype]
        return math.prod(self.shape) * size


def pool_arrays(
    dtype: str, block_tokens: int, kv_heads: int, head_dim: int
) -> tuple[PoolArray, ...]:
    """The arrays of a layer's pool, in the order in which they are operands.

    `dtype` is float16, float32 or q8_0. Keys and scales lie with their tokens last, values with
    their columns last. In q8_0 a number is an int8 code times the f16 scale that `KV_GROUP` columns
    of a token share.
    """
    keys, values = (kv_heads, head_dim, block_tokens), (kv_heads, block_tokens, head_dim)
    if dtype != "q8_0":
        return PoolArray("keys", keys, dtype), PoolArray("values", values, dtype)
    scales = (kv_heads, head_dim // KV_GROUP, block_tokens)
    return (
        PoolArray("keys", keys, "int8"),
        PoolArray("key_scales", scales, "float16"),
        PoolArray("values", values, "int8"),
        PoolArray("value_scales", scales, "float16"),
    )


@dataclass(frozen=True)
class KvLayout:
    """The K/V pools; `layers` holds (kv_heads, head_dim, window) of each.

    `dtype` is float16, float32 or q8_0.
    """

    dtype: str
    block_tokens: int
    segment_tokens: int
    tile_rows: int
    layers: tuple[tuple[int, int, int], ...]

    def arrays(self, layer: int) -> tuple[PoolArray, ...]:
        """Those of a layer, in the order in which they are operands."""
        kv_heads, head_dim, _ = self.layers[layer]
        return pool_arrays(self.dtype, self.block_tokens, kv_heads, head_dim)

    def token_bytes(self, layer: int) -> int:
        """Bytes that a token takes in a layer."""
        return sum(array.block_bytes for array in self.arrays(layer)) // self.block_tokens

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of the groups, in order."""
        return windows_of(window for _, _, window in self.layers)

    def block_bytes(self, window: int) -> int:
        """Of a block of the group of a window."""
        return sum(
            array.block_bytes
            for layer, (*_, seen) in enumerate(self.layers)
            if seen == window
            for array in self.arrays(layer)
        )


@dataclass(frozen=True)
class Manifest:
    """Everything a loader decides by."""

    xpuc_version: str
    tvm_version: str
    tvm_ffi_version: str
    target: dict[str, Any]  # kind, triple, cpu, features
    arch: str
    name: str
    n_vocab: int
    d_model: int
    n_layers: int
    context: int  # tokens a sequence may have (--ctx)
    max_batch: int
    max_chunk: int
    max_out_rows: int  # rows a prefill call gives logits of
    deterministic: bool
    activations: str  # int8 | f32
    kv: KvLayout
    entry_points: tuple[EntryPoint, ...]
    planes: tuple[Plane, ...]
    tokenizer: dict[str, Any]
    source: dict[str, Any]  # file name, bytes, digest of the checkpoint
    decisions: dict[str, Any]  # schedules and fusions, chosen and refused
    memory: dict[str, int]  # bytes: weights, activations (planned, largest entry point)
    synthetic: Synthetic | None = None  # in place of a weight file
    prefill_weights: str = "packed"  # packed | int8 | auto: what prompts are multiplied with
    copies: tuple[Copy, ...] = ()  # operands of the entry points that take them, in this order
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # see `file_facts`
    format_version: int = FORMAT_VERSION

    @property
    def operations(self) -> list[dict[str, Any]]:
        """Every operation: facts, schedule, why, kernels, uses by entry point."""
        found: list[dict[str, Any]] = self.decisions["operations"]
        return found

    @property
    def copy_bytes(self) -> int:
        """What all copies take."""
        return sum(copy.size for copy in self.copies)

    def to_json(self) -> str:
        """The text of manifest.json; its last key is the digest of the text without that key."""
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"
        return text.removesuffix(_END) + _DIGEST + f'"{_text_digest(text)}"' + _END


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an artifact; ArtifactError if missing, damaged or of another version."""
    path = directory / MANIFEST
    recompile = compile_again(directory)
    if not path.is_file():
        raise ArtifactError(
            f"{directory}: not an xpuc artifact (no {MANIFEST})",
            "give the folder that xpuc compile wrote",
        )
    try:
        text = path.read_bytes().decode()
        raw = json.loads(text)
    except (ValueError, OSError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable as JSON ({error})", recompile) from None
    found = raw.get("format_version") if isinstance(raw, dict) else None
    if found != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: artifact format {found}, this xpuc reads format {FORMAT_VERSION}", recompile
        )
    if not _is_whole(text):
        raise ArtifactError(
            f"{path}: was changed after it was written (its digest does not fit)",
            copy_again(directory),
        )
    try:
        return _from_json({name: raw[name] for name in raw if name != "digest"})
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: incomplete manifest ({error})", recompile) from None


def compile_again(directory: Path) -> str:
    """The hint that mends an artifact of another machine or version."""
    return f"compile the model again: xpuc compile MODEL -o {shlex.quote(str(directory))}"


def copy_again(directory: Path) -> str:
    """The hint that mends a damaged artifact."""
    return f"copy the artifact again, or {compile_again(directory)}"


def _is_whole(text: str) -> bool:
    """Whether the manifest's text is as `Manifest.to_json` wrote it."""
    before, _, after = text.rpartition(_DIGEST)
    return after == f'"{_text_digest(before + _END)}"' + _END


def _text_digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _from_json(raw: dict[str, Any]) -> Manifest:
    kv = raw["kv"] | {"layers": tuple(tuple(layer) for layer in raw["kv"]["layers"])}
    return Manifest(
        **raw
        | {
            "kv": KvLayout(**kv),
            "entry_points": tuple(EntryPoint(**e) for e in raw["entry_points"]),
            "planes": tuple(Plane(**p) for p in raw["planes"]),
            "synthetic": _synthetic(raw["synthetic"]),
            "copies": tuple(Copy(**c | {"planes": tuple(c["planes"])}) for c in raw["copies"]),
        }
    )


def _synthetic(raw: dict[str, Any] | None) -> Synthetic | None:
    if raw is None:
        return None
    ranges = tuple(None if each is None else (each[0], each[1]) for each in raw["ranges"])
    return Synthetic(raw["seed"], ranges)


def digest(path: Path) -> str:
    """The XXH3-128 of a file's bytes, in hex."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def header_digest(path: Path) -> str:
    """The XXH3-128 of a safetensors header: a load checks it of the weights, besides their size."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # A damaged length may be any number.
        return xxhash.xxh3_128(file.read(min(length, path.stat().st_size))).hexdigest()


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """`bytes` and `xxh3_128` of every file but the manifest, by relative path.

    The weights have `header_xxh3_128` as well.
    """
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "xxh3_128": digest(path)}
        | ({"header_xxh3_128": header_digest(path)} if path.name == WEIGHTS else {})
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
