"""What an architecture needs to know of a checkpoint, read from its metadata with types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from xpuc.artifact import windows_of
from xpuc.errors import FileError, UnsupportedError

T = TypeVar("T", int, float, str, bool)
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `n_rot` columns of each head.

    `pairing` is "norm" (columns 2i and 2i+1 turn together) or "neox" (i and i + n_rot/2).
    """

    n_rot: int
    base: float
    pairing: str
    scaling: str = "none"  # none | linear | yarn
    factor: float = 1.0  # context extension
    original_context: int = 0
    attention_factor: float = 1.0
    extrapolation: float = 1.0  # yarn's ext_factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    frequency_factors: tuple[
        float, ...
    ] = ()  # divides each frequency (Llama 3's rope_freqs.weight)

    def inverse_frequencies(self) -> np.ndarray:
        """Radians per position of each pair, float64 (n_rot/2,), after scaling."""
        pair = np.arange(self.n_rot // 2, dtype=np.float64)
        inverse = self.base ** (-2.0 * pair / self.n_rot)
        if self.frequency_factors:
            inverse = inverse / np.asarray(self.frequency_factors, dtype=np.float64)
        if self.scaling == "linear":
            return inverse / self.factor
        if self.scaling == "yarn":
            keep = self._yarn_keep(pair) * self.extrapolation
            return inverse / self.factor * (1.0 - keep) + inverse * keep
        return inverse

    @property
    def mscale(self) -> float:
        """What cos and sin are multiplied by: YaRN's attention temperature, as llama.cpp has it."""
        if self.scaling == "yarn" and self.extrapolation != 0.0:
            return self.attention_factor * (1.0 + 0.1 * math.log(max(1.0, self.factor)))
        return self.attention_factor

    def _yarn_keep(self, pair: np.ndarray) -> np.ndarray:
        """1 for pairs that turn often enough to be left alone, 0 for interpolated ones.

        YaRN (arXiv 2309.00071), equations 22 to 24.
        """

        def correction(rotations: float) -> float:
            turns = self.original_context / (rotations * 2.0 * math.pi)
            return self.n_rot * math.log(turns) / (2.0 * math.log(self.base))

        low = max(0.0, math.floor(correction(self.beta_fast)))
        high = min(self.n_rot - 1.0, math.ceil(correction(self.beta_slow)))
        ramp = (pair - low) / max(0.001, high - low)
        return 1.0 - np.clip(ramp, 0.0, 1.0)


@dataclass(frozen=True)
class Attention:
    """One layer's attention. `window` counts the visible tokens, 0: all; a `softcap` of 0: none."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder, whatever its architecture."""

    arch: str
    n_vocab: int
    d_model: int
    d_ff: int
    eps: float
    context: int  # positions it was trained for
    layers: tuple[Attention, ...]
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of the groups of layers, see `artifact.windows_of`."""
        return windows_of(layer.window for layer in self.layers)


class Reader:
    """Typed reads of `<arch>.<key>`; a key missing or of another kind is a FileError naming it."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, path: str) -> None:
        self.metadata, self.arch, self.path = metadata, arch, path

    def full(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        return self.full(key) in self.metadata

    def read(self, kind: type[T], key: str, default: T = _REQUIRED) -> T:
        """The value of a scalar key, or `default`; without a default the key is required."""
        name = self.full(key)
        if name not in self.metadata:
            if default is _REQUIRED:
                raise FileError(
                    f"{self.path}: metadata key {name} is missing",
                    "the file is not a complete model",
                )
            return default
        return self._convert(kind, name, self.metadata[name])

    def count(self, key: str, most: int) -> int:
        """A required number of 1 to `most`."""
        value = self.read(int, key)
        if not 1 <= value <= most:
            raise FileError(
                f"{self.path}: metadata key {self.full(key)} is {value}, expected 1 to {most}",
                "the file is malformed",
            )
        return value

    def is_array(self, key: str) -> bool:
        return isinstance(self.metadata.get(self.full(key)), np.ndarray | list | tuple)

    def per_layer(self, key: str, n_layers: int, default: int = _REQUIRED) -> tuple[int, ...]:
        """An integer key that is one number for all layers or an array with one a layer."""
        name = self.full(key)
        if self.is_array(key):
            value = self.metadata[name]
            if len(value) != n_layers:
                raise FileError(
                    f"{self.path}: {name} has {len(value)} entries for {n_layers} layers",
                    "the file is not a complete model",
                )
            return tuple(int(v) for v in value)
        return (self.read(int, key, default),) * n_layers

    def must_be(self, key: str, wanted: Any, default: Any) -> None:
        """Refuse a model that asks for what its architecture file does not build."""
        found = self.metadata.get(self.full(key), default)
        if found != wanted:
            raise UnsupportedError(
                f"{self.path}: {self.full(key)} is {found!r},"
                f" which xpuc does not build for {self.arch}",
                f"supported: {wanted!r}",
            )

    def _convert(self, kind: type[T], name: str, value: Any) -> T:
        good = {
            int: isinstance(value, int) and not isinstance(value, bool),
            float: isinstance(value, int | float) and not isinstance(value, bool),
            str: isinstance(value, str),
            bool: isinstance(value, bool),
        }[kind]
        if not good or (kind is float and not math.isfinite(value)):
            raise FileError(
                f"{self.path}: metadata key {name} is {value!r}, expected {kind.__name__}",
                "the file is malformed",
            )
        return kind(value)


def read_rope(reader: Reader, head_dim: int, pairing: str, factors: np.ndarray | None) -> Rope:
    """The rotary embedding of `<arch>.rope.*`; `factors` is rope_freqs.weight if there is one."""
    # A factor without a type means linear scaling, as llama.cpp reads it.
    has_factor = reader.has("rope.scaling.factor") or reader.has("rope.scale_linear")
    kind = reader.read(str, "rope.scaling.type", "linear" if has_factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{reader.path}: {reader.full('rope.scaling.type')} is {kind!r}",
            "supported: none, linear, yarn, and Llama 3's frequency factors",
        )
    factor = reader.read(float, "rope.scaling.factor", reader.read(float, "rope.scale_linear", 1.0))
    n_rot = reader.read(int, "rope.dimension_count", head_dim)
    if n_rot % 2 or not 0 < n_rot <= head_dim:
        raise FileError(
            f"{reader.path}: {reader.full('rope.dimension_count')} is {n_rot},"
            f" for heads of {head_dim}",
            "an even number up to the head size is expected",
        )
    if factors is not None and len(factors) != n_rot // 2:
        raise FileError(
            f"{reader.path}: rope_freqs.weight has {len(factors)} values, {n_rot // 2} are needed",
            "the file is malformed",
        )
    return Rope(
        n_rot=n_rot,
        base=reader.read(float, "rope.freq_base", 10000.0),
        pairing=pairing,
        scaling=kind if factor != 1.0 else "none",
        factor=factor,
        original_context=reader.read(
            int, "rope.scaling.original_context_length", reader.read(int, "context_length")
        ),
        attention_factor=reader.read(float, "rope.scaling.attn_factor", 1.0),
        extrapolation=reader.read(float, "rope.scaling.yarn_ext_factor", 1.0),
        beta_fast=reader.read(float, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=reader.read(float, "rope.scaling.yarn_beta_slow", 1.0),
        frequency_factors=() if factors is None else tuple(float(f) for f in factors),
    )


def check_attention(reader: Reader, layers: tuple[Attention, ...]) -> None:
    """Refuse head counts no attention can have."""
    for i, layer in enumerate(layers):
        if min(layer.heads, layer.kv_heads, layer.head_dim) < 1 or layer.heads % layer.kv_heads:
            raise FileError(
                f"{reader.path}: layer {i} has {layer.heads} heads over {layer.kv_heads} K/V heads"
                f" of size {layer.head_dim}",
                "heads must be a multiple of K/V heads",
            )
        if layer.head_dim % 8:
            raise UnsupportedError(
                f"{reader.path}: layer {i} has heads of size {layer.head_dim}",
                "head sizes that are multiples of 8 are supported",
            )
