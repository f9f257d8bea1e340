"""Packing: the sizes of planes, padding, chunks, and that no bit is lost or used twice."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from xpuc.errors import UnsupportedError
from xpuc.schedules.llvm import packing
from xpuc.schedules.llvm.layouts import layout_of, pack, planes
from xpuc.schedules.packed import ALIGNMENT, FORMATS
from xpuc.schedules.packed.bits import PIECES


def raw_rows(format: str, rows: int, k: int) -> np.ndarray:
    layout = layout_of(format)
    shape = rows, k // layout.columns * layout.nbytes
    return np.random.default_rng(rows).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_those_of_gguf(format: str) -> None:
    layout = layout_of(format)
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    assert (layout.columns, layout.nbytes) == sizes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [16, 21])
def test_pack_fills_the_promised_planes(format: str, rows: int) -> None:
    promised = planes(format, rows, 512)
    got = pack(format, raw_rows(format, rows, 512))
    assert [(p.name, p.dtype, p.size) for p in promised] == [
        (name, str(a.dtype), a.size) for name, a in got.items()
    ]
    assert all(a.nbytes % ALIGNMENT == 0 for a in got.values())


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_are_at_most_4_percent_larger(format: str) -> None:
    raw = layout_of(format).nbytes * (4096 // layout_of(format).columns) * 4096
    size = sum(p.size * np.dtype(p.dtype).itemsize for p in planes(format, 4096, 4096))
    assert raw <= size <= 1.04 * raw


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_fill_no_group_are_followed_by_zero_blocks(format: str) -> None:
    raw = raw_rows(format, 21, 256)
    zeros = np.zeros((3, raw.shape[1]), np.uint8)
    whole = pack(format, np.concatenate([raw, zeros]))
    for name, plane in pack(format, raw).items():
        assert plane.tobytes() == whole[name].tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_packing_in_chunks_changes_nothing(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_rows(format, 40, 256)
    at_once = pack(format, raw)
    monkeypatch.setattr(packing, "_CHUNK_BYTES", 1)
    for name, plane in pack(format, raw).items():
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
        layout_of("Q4_2")
    assert "Q4_2" in failure.value.message
    assert "Q4_1" in failure.value.hint
