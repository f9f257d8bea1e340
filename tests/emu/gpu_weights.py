"""Random packed matrices for GPU kernels: their planes, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from activations import q8a, values_of
from tiny_weights import random_matrix

from xpuc.schedules.cuda import layouts
from xpuc.schedules.cuda.products import Weight
from xpuc.schedules.packed import packed


@dataclass(frozen=True)
class Matrix:
    """A random matrix (rows, k) of a format."""

    weight: Weight
    values: Any  # f64 (rows, k)
    planes: list[Any]
    raw: Any  # blocks as GGUF has them, uint8 (rows, bytes of a row)


def matrix(format: str, rows: int, k: int, seed: int = 0) -> Matrix:
    """A random matrix of that format."""
    raw, kind = random_matrix(np.random.default_rng(seed), format, (rows, k), 0.05)
    assert kind.name == format, f"{k} columns are no whole blocks of {format}"
    raw = raw.view(np.uint8)
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[format]).astype(np.float64)
    return Matrix(Weight(format, rows), values, list(layouts.pack(format, raw).values()), raw)


def activation(kind: str, n: int, k: int) -> tuple[list[Any], Any]:
    """Random activations of n rows as arguments of a kernel, and the f64 values they stand for."""
    x = np.random.default_rng(n + k).standard_normal((n, k), np.float32)
    x[-1, 32:64], x[0, 5] = 0, 40
    if kind == "f32":
        return [x], x.astype(np.float64)
    quantised = q8a(x)
    return quantised, values_of(quantised)


def kind_of(format: str) -> str:
    """What a matrix of the format is multiplied with by default."""
    return "q8" if packed(format).is_quantised else "f32"
