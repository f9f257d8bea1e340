"""Random weights in any GGUF format: floats that `gguf` quantises, else random valid blocks."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

Type = gguf.GGMLQuantizationType

# Where a block keeps its float16 scale and (or None) its minimum's, in bytes; and how many scales
# make one minimum, so that the weights have a mean near 0.
BLOCKS: dict[str, tuple[int, int | None, float]] = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}
QUANTISED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FORMATS = (*QUANTISED, *BLOCKS)

# What llama.cpp's quantiser takes instead, where a row is no multiple of 256.
NARROW = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


def fitting(name: str, columns: int) -> str:
    """The format a row of `columns` gets when `name` is asked for."""
    if columns % gguf.GGML_QUANT_SIZES[Type[name]][0] == 0:
        return name
    narrow = NARROW.get(name, "F16")
    return narrow if columns % gguf.GGML_QUANT_SIZES[Type[narrow]][0] == 0 else "F16"


def random_blocks(
    rng: np.random.Generator, name: str, shape: tuple[int, int], std: float
) -> NDArray[np.uint8]:
    """Random bytes that are valid blocks and decode to weights of `std`: (rows, bytes a row)."""
    rows, columns = shape
    size, n_bytes = gguf.GGML_QUANT_SIZES[Type[name]]
    at, min_at, ratio = BLOCKS[name]
    blocks = rng.integers(0, 256, (rows * columns // size, n_bytes), dtype=np.uint8)
    spread = rng.uniform(0.5, 1.5, len(blocks))

    def put_scales(scale: float) -> None:
        blocks[:, at : at + 2] = (spread * scale).astype("<f2").view(np.uint8).reshape(-1, 2)
        if min_at is not None:
            least = (spread * scale * ratio).astype("<f2").view(np.uint8).reshape(-1, 2)
            blocks[:, min_at : min_at + 2] = least

    # A block is linear in its scales: decode once to learn what the rest of it gives.
    put_scales(2.0**-6)
    put_scales(2.0**-6 * std / float(gguf.dequantize(blocks, Type[name]).std()))
    return blocks.reshape(rows, -1)


def random_matrix(
    rng: np.random.Generator, name: str, shape: tuple[int, int], std: float
) -> tuple[NDArray[np.generic], gguf.GGMLQuantizationType]:
    """A matrix (out, in) of weights of `std`, packed as `name` or as fits; and its type."""
    kind = fitting(name, shape[1])
    if kind in BLOCKS:
        return random_blocks(rng, kind, shape, std), Type[kind]
    floats = (rng.standard_normal(shape) * std).astype(np.float32)
    return gguf.quantize(floats, Type[kind]), Type[kind]
