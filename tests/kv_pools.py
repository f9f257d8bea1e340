"""K/V pools that numpy fills, and the gguf package where numbers are quantised."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from xpuc.artifact import pool_arrays

Array = np.ndarray[Any, Any]


def stored(dtype: str, rows: Array) -> list[Array]:
    """What a pool keeps of f32 rows (..., columns): the numbers, or codes and scales."""
    if dtype != "q8_0":
        return [rows.astype(dtype)]
    blocks = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0).reshape(*rows.shape[:-1], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return [blocks[..., 2:].view(np.int8).reshape(rows.shape), scales]


def kept(dtype: str, rows: Array) -> Array:
    """f32 rows as they are read again."""
    first, *scales = (part.astype(np.float32) for part in stored(dtype, rows))
    return first * np.repeat(scales[0], 32, axis=-1) if scales else first


def filled(
    n_blocks: int, kv_heads: int, head_dim: int, *, dtype: str, block_tokens: int, filler: float
) -> list[Array]:
    """The arrays of a pool that holds `filler`, or 9 where that is no integer."""
    return [
        np.full((n_blocks, *a.shape), 9 if a.dtype == "int8" else filler, a.dtype)
        for a in pool_arrays(dtype, block_tokens, kv_heads, head_dim)
    ]


def at(arrays: list[Array], slot: tuple[int, int]) -> list[Array]:
    """Views of what each array holds for the token at `slot` = (block, offset)."""
    block, offset = slot
    values = len(arrays) // 2  # the only array whose tokens are not last
    return [
        array[block, :, offset] if i == values else array[block, ..., offset]
        for i, array in enumerate(arrays)
    ]


def write(arrays: list[Array], dtype: str, slot: tuple[int, int], k: Array, v: Array) -> None:
    """Write a token's key and value, f32 (kv_heads, head_dim), to `slot`."""
    for view, part in zip(at(arrays, slot), [*stored(dtype, k), *stored(dtype, v)], strict=True):
        view[:] = part
