"""Every weight format, bit for bit, against the gguf package: in numpy and compiled."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuc.codegen.kernels import dequantize as kernels
from xpuc.errors import UnsupportedError
from xpuc.ir.formats import Format, dequantize, format_of, formats, random_blocks, row_bytes

BLOCKS = 64  # a row of the random weights
ROWS = 6

# (byte, dtype) of each scale, minimum or whole weight: where a NaN or an infinity may enter.
REALS = {
    "F32": [(0, "<f4")],
    "F16": [(0, "<f2")],
    "BF16": [(0, "<u2")],
    "Q4_1": [(0, "<f2"), (2, "<f2")],
    "Q5_1": [(0, "<f2"), (2, "<f2")],
    "Q2_K": [(80, "<f2"), (82, "<f2")],
    "Q3_K": [(108, "<f2")],
    "Q4_K": [(0, "<f2"), (2, "<f2")],
    "Q5_K": [(0, "<f2"), (2, "<f2")],
    "Q6_K": [(208, "<f2")],
}  # the others: one f16 first
EXTREMES = (np.inf, -np.inf, 0.0, -0.0, 1e-40, 6e-8, -6e-8, 3e-5, 65504.0)


def fields(format: Format) -> list[tuple[int, str]]:
    return REALS.get(format.name, [(0, "<f2")])


def bits_of(value: float, dtype: str) -> bytes:
    if dtype == "<u2":  # bfloat16
        return (np.array(value, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.array(value, dtype).tobytes()


def without_nan(format: Format, blocks: np.ndarray) -> np.ndarray:
    """The blocks with the exponent of every NaN field cleared to a finite one."""
    blocks = blocks.copy()
    for at, dtype in fields(format):
        size = np.dtype(dtype).itemsize
        exponent = 0x7C if dtype == "<f2" else 0x7F
        top = blocks[:, at + size - 1]
        top[(top & exponent) == exponent] &= 0xBF
    return blocks


def random_rows(format: Format) -> np.ndarray:
    """Random bytes (ROWS, row_bytes): each extreme scale in some blocks, no scale NaN."""
    rng = np.random.default_rng(format.n * 1000 + format.nbytes)
    blocks = rng.integers(0, 256, (ROWS * BLOCKS, format.nbytes), dtype=np.uint8)
    blocks = without_nan(format, blocks)
    for at, dtype in fields(format):
        for value in EXTREMES:
            raw = np.frombuffer(bits_of(value, dtype), np.uint8)
            blocks[rng.integers(0, len(blocks), 3), at : at + len(raw)] = raw
    return blocks.reshape(ROWS, -1)


def by_gguf(format: Format, raw: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        kind = gguf.GGMLQuantizationType[format.name]
        return np.asarray(gguf.dequantize(raw, kind)).reshape(len(raw), -1)


ALL = sorted(formats().values(), key=lambda format: format.name)
each_format = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)


def test_the_formats_are_the_promised_ones() -> None:
    legacy = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    k = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert set(formats()) == legacy | k | {"IQ4_NL", "IQ4_XS"}


@each_format
def test_block_size_is_ggufs(format: Format) -> None:
    kind = gguf.GGMLQuantizationType[format.name]
    assert (format.n, format.nbytes) == gguf.GGML_QUANT_SIZES[kind]


@each_format
def test_numpy_equals_gguf(format: Format) -> None:
    raw = random_rows(format)
    expected = by_gguf(format, raw)
    assert np.isfinite(expected).mean() > 0.8
    np.testing.assert_array_equal(dequantize(format, raw), expected)


@each_format
def test_compiled_equals_gguf(format: Format) -> None:
    raw = random_rows(format)
    expected = by_gguf(format, raw)
    func = kernels.dequantize(format, *expected.shape)
    out = tvm.runtime.tensor(np.zeros_like(expected))
    target = tvm.target.Target({"kind": "llvm", "mcpu": "znver1"})
    tvm.compile(func, target=target)[func.attrs["global_symbol"]](tvm.runtime.tensor(raw), out)
    np.testing.assert_array_equal(out.numpy(), expected)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_block_decodes_as_ggufs(data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(ALL))
    raw = data.draw(st.binary(min_size=format.nbytes, max_size=format.nbytes))
    block = without_nan(format, np.frombuffer(raw, np.uint8).reshape(1, -1))
    np.testing.assert_array_equal(dequantize(format, block), by_gguf(format, block))


def test_rows_decoded_in_parts_are_the_rows() -> None:
    format = format_of("Q8_0")
    raw = np.tile(random_rows(format), (100, 1))
    assert raw.size > 1 << 20  # more than one part
    np.testing.assert_array_equal(dequantize(format, raw), by_gguf(format, raw))


@each_format
def test_random_blocks_are_of_the_sizes_asked_for(format: Format) -> None:
    blocks = random_blocks(format, 0.002, 0.125, 64)
    largest = np.abs(by_gguf(format, blocks)).max(axis=1)
    assert len(largest) >= 64
    assert largest.min() >= 0.002
    assert largest.max() <= 0.125
    np.testing.assert_array_equal(blocks, random_blocks(format, 0.002, 0.125, 64))


def test_row_bytes() -> None:
    assert row_bytes(format_of("Q4_K"), 512) == 288
    assert row_bytes(format_of("F32"), 5) == 20


def test_a_broken_row_is_refused() -> None:
    with pytest.raises(UnsupportedError) as error:
        row_bytes(format_of("Q6_K"), 384)
    assert "384" in error.value.message
    assert "256" in error.value.hint


@pytest.mark.parametrize("name", ["IQ2_XS", "q4_0", "__INIT__", "ACCESS"])
def test_an_unknown_format_names_the_known(name: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        format_of(name)
    assert name in error.value.message
    assert all(known in error.value.hint for known in formats())


def test_formats_need_no_tvm() -> None:
    code = "import sys, xpuc.ir.formats as f; f.formats(); sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
