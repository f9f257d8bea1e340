"""Random weights for the kernel tests: raw rows, their values by the gguf package, their planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from activations import q8a, values_of
from tiny_weights import random_matrix

from xpuc.schedules.llvm.layouts import layout_of, pack
from xpuc.schedules.llvm.products import Weight

QUICK = ("Q4_1", "Q8_0", "Q4_K", "Q6_K")  # a minimum, signed, super-blocks, factors of half blocks


@dataclass(frozen=True)
class Packed:
    """A random matrix (rows, k): what a kernel takes, and what it means."""

    weight: Weight
    values: Any  # f64 (rows, k)
    planes: list[Any]


def packed(format: str, rows: int, k: int, seed: int = 0) -> Packed:
    """A random matrix of that format."""
    raw, kind = random_matrix(np.random.default_rng(seed), format, (rows, k), 0.05)
    assert kind.name == format, f"{k} columns are no whole blocks of {format}"
    return of_rows(format, raw.view(np.uint8))


def of_rows(format: str, raw: Any) -> Packed:
    """The matrix of raw rows uint8 (rows, row_bytes)."""
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[format]).astype(np.float64)
    return Packed(Weight(format, len(raw)), values, list(pack(format, raw).values()))


def columns_for(format: str) -> int:
    """A small number of columns that makes several blocks."""
    return 512 if layout_of(format).columns == 256 else 160


def activation(kind: str, x: Any) -> tuple[list[Any], Any]:
    """f32 (n, k) as arguments of a kernel, and the f64 values these stand for."""
    if kind == "f32":
        return [x], x.astype(np.float64)
    quantised = q8a(x)
    return quantised, values_of(quantised)


def random_x(n: int, k: int) -> Any:
    """Activations with a zero block and an outlier."""
    x = np.random.default_rng(n).standard_normal((200, k), np.float32)[:n].copy()
    x[-1, 32:64] = 0
    x[0, 5] = 40
    return x


def relative_error(got: Any, want: Any) -> float:
    """The largest difference, in terms of the largest value."""
    return float(np.abs(got - want).max() / np.abs(want).max())
