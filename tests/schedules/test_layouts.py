"""Packing: the sizes of planes, padding, chunks, and that no bit is lost or used twice."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from xpuc.errors import UnsupportedError
from xpuc.schedules.cuda import layouts as gpu
from xpuc.schedules.llvm import layouts as cpu
from xpuc.schedules.llvm import packing
from xpuc.schedules.packed import ALIGNMENT, FORMATS, packed
from xpuc.schedules.packed.bits import PIECES


def raw_rows(format: str, rows: int, k: int) -> np.ndarray:
    facts = packed(format)
    shape = rows, k // facts.columns * facts.nbytes
    return np.random.default_rng(rows).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_those_of_gguf(format: str) -> None:
    facts = packed(format)
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    assert (facts.columns, facts.nbytes) == sizes


LAYOUTS = pytest.mark.parametrize("layout", [cpu, gpu], ids=["cpu", "gpu"])


@LAYOUTS
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [16, 21])
def test_pack_fills_the_promised_planes(layout: Any, format: str, rows: int) -> None:
    promised = layout.planes(format, rows, 512)
    got = layout.pack(format, raw_rows(format, rows, 512))
    assert [(p.name, p.dtype, p.size) for p in promised] == [
        (name, str(a.dtype), a.size) for name, a in got.items()
    ]
    assert all(a.nbytes % ALIGNMENT == 0 for a in got.values())


@LAYOUTS
@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_are_at_most_4_percent_larger(layout: Any, format: str) -> None:
    raw = packed(format).nbytes * (4096 // packed(format).columns) * 4096
    size = sum(p.size * np.dtype(p.dtype).itemsize for p in layout.planes(format, 4096, 4096))
    assert raw <= size <= 1.04 * raw


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_fill_no_group_are_followed_by_zero_blocks(format: str) -> None:
    raw = raw_rows(format, 21, 256)
    zeros = np.zeros((3, raw.shape[1]), np.uint8)
    whole = cpu.pack(format, np.concatenate([raw, zeros]))
    for name, plane in cpu.pack(format, raw).items():
        assert plane.tobytes() == whole[name].tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_reads_rows_one_after_the_other(format: str) -> None:
    raw = raw_rows(format, 21, 512)
    for name, plane in gpu.pack(format, raw).items():
        parts = [gpu.pack(format, raw[row : row + 1])[name] for row in range(21)]
        n = sum(p.size for p in gpu.planes(format, 4096, 512) if p.name == name) // 4096
        assert plane[: 21 * n].tobytes() == b"".join(part[:n].tobytes() for part in parts)


@LAYOUTS
@pytest.mark.parametrize("format", FORMATS)
def test_packing_in_chunks_changes_nothing(
    layout: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = raw_rows(format, 40, 256)
    at_once = layout.pack(format, raw)
    monkeypatch.setattr(packing if layout is cpu else gpu, "_CHUNK_BYTES", 1)
    for name, plane in layout.pack(format, raw).items():
        assert plane.tobytes() == at_once[name].tobytes()


@pytest.mark.parametrize("bits", PIECES)
def test_every_bit_of_a_unit_is_used_once(bits: int) -> None:
    used = [
        (byte, low + i)
        for pieces in PIECES[bits]
        for byte, low, count in pieces
        for i in range(count)
    ]
    assert sorted(used) == [(byte, bit) for byte in range(bits) for bit in range(8)]
    assert all(sum(p[2] for p in pieces) == bits for pieces in PIECES[bits])


def test_an_unknown_format_is_a_user_error() -> None:
    with pytest.raises(UnsupportedError) as failure:
        packed("Q4_2")
    assert "Q4_2" in failure.value.message
    assert "Q4_1" in failure.value.hint
