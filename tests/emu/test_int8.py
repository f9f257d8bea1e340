"""Int8 copies of weights and the products of prompts with them, on the emulated GPU."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from activations import q8a, values_of
from device.difference import difference
from emu.device import Out, run
from emu.gpu_weights import Matrix, matrix
from expectations import close, same
from tiny_weights import random_matrix

from xpuc.schedules.cuda import int8_matmul, layouts
from xpuc.schedules.cuda.regroup import regroup, shapes
from xpuc.schedules.cuda.widen import element_planes, pays, why_not, widen
from xpuc.schedules.packed import FORMATS, packed

PAYING = tuple(format for format in FORMATS if pays(format))
GROUP = 256


def test_what_pays() -> None:
    """An integer scale for every 32 columns in blocks of one float scale; which, is measured."""
    assert PAYING == ("IQ4_XS", "Q4_K", "Q5_K")
    for format in PAYING:
        fields = {field.name: field for field in packed(format).planes}
        assert packed(format).columns == GROUP == 32 * fields["scales"].per_block
        assert fields["scales"].dtype in ("uint8", "int8")
    for format in set(FORMATS) - set(PAYING):
        assert why_not(format)


def codes_of(format: str, raw: Any) -> Any:
    """What GGUF's blocks multiply with the scale of 32 columns, int8 (elements,)."""
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]][1])
    width = 16 if format == "IQ4_XS" else 32  # of bytes whose lower halves come first
    pairs = blocks[:, -128:].reshape(-1, 1, width) >> np.array([[0], [4]], np.uint8)
    nibbles = (pairs & 15).reshape(-1, 8, 32)
    if format == "IQ4_XS":
        return np.array(gguf.quants.IQ4_NL.kvalues, np.int8)[nibbles].reshape(-1)
    if format == "Q5_K":
        nibbles |= (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return nibbles.astype(np.int8).reshape(-1)


def widened(format: str, raw: Any, planes: dict[str, Any]) -> Any:
    """The copy of a matrix made by the kernel, int8 (rows * k,)."""
    want = codes_of(format, raw)
    elements = [planes[name] for name in element_planes(format)]
    (codes,) = run(widen(format), *elements, Out(want.shape, "int8"))
    same(codes, want)
    return codes


def copy_of(format: str, rows: int, k: int, seed: int = 0) -> tuple[Matrix, Any]:
    """A random matrix, and its copy."""
    made = matrix(format, rows, k, seed)
    names = [plane.name for plane in layouts.planes(format, rows, k)]
    return made, widened(format, made.raw, dict(zip(names, made.planes, strict=True)))


@pytest.mark.parametrize("format", PAYING)
def test_a_copy_is_exact(format: str) -> None:
    """Codes times the format's scales, less its minimums, are the weights to the last bit."""
    rows, k = 5, 768
    raw, _ = random_matrix(np.random.default_rng(0), format, (rows, k), 0.05)
    raw = raw.view(np.uint8)
    planes = layouts.pack(format, raw)
    codes = widened(format, raw, planes)
    blocks = rows * k // GROUP
    scale = planes["d"][:blocks, None].astype(np.float32) * planes["scales"][: 8 * blocks].reshape(
        blocks, 8
    ).astype(np.float32)
    weights = scale[..., None] * codes.reshape(blocks, 8, 32).astype(np.float32)
    if "mins" in planes:
        mins = planes["mins"][: 8 * blocks].reshape(blocks, 8).astype(np.float32)
        weights += (planes["m"][:blocks, None].astype(np.float32) * mins)[..., None]
    want = gguf.dequantize(raw, gguf.GGMLQuantizationType[format])
    np.testing.assert_array_equal(weights.reshape(rows, k), want)


def random_x(n: int, k: int) -> Any:
    """Rows with an outlier, halves of zeros, and a group of zeros in the last."""
    x = np.random.default_rng(n + k).standard_normal((n, k), np.float32)
    x[0, 5], x[n // 2, 32:80], x[-1, :GROUP] = 40, 0, 0
    return x


def regrouped(x: Any) -> list[Any]:
    """What the kernel makes of the rows' q8a."""
    n, k = x.shape
    return run(regroup(k), *q8a(x), *(Out(shape, dtype) for _, shape, dtype in shapes(n, k)))


def grouped(x: Any) -> list[Any]:
    """The same, of rows of numbers."""
    got = regrouped(x)
    for a, b in zip(got, groups_of(*q8a(x)[:2]), strict=True):
        same(a, b)
    return got


def groups_of(quants: Any, scales: Any) -> tuple[Any, Any, Any]:
    """Codes, scale and sums of a q8a: its halves in terms of the largest scale of their group."""
    n, k = quants.shape[1], 32 * len(quants)
    halves = scales.transpose(1, 0, 2).reshape(n, k // GROUP, 16)
    scale = halves.max(2)
    by = np.divide(halves, scale[..., None], where=scale[..., None] > 0, out=np.zeros_like(halves))
    given = quants.transpose(1, 0, 2).reshape(n, k // GROUP, 16, 16)
    codes = np.rint(given * by[..., None].astype(np.float32)).astype(np.int8)
    total = codes.reshape(n, k // GROUP, 8, 32).sum(3, dtype=np.int64)
    low = (total + 32) % 64 - 32
    sums = np.concatenate([low, total - low], 2)
    return codes.reshape(n, k), scale.T, sums.transpose(1, 0, 2)


def grouped_values(tensors: list[Any]) -> Any:
    """What the codes stand for, f64 (n, k)."""
    codes, scale, _ = tensors
    return codes.astype(np.float64) * np.repeat(scale.T.astype(np.float64), GROUP, axis=1)


def test_activations_in_groups() -> None:
    n, k = 7, 512
    tensors = grouped(random_x(n, k))
    off = difference(grouped_values(tensors), values_of(q8a(random_x(n, k))))
    assert off < 0.5 / 127


def test_a_nan_is_kept_by_its_group() -> None:
    x = random_x(3, 512)
    x[1, 300] = np.nan
    with np.errstate(all="ignore"):
        _, scale, _ = regrouped(x)
        want = groups_of(*q8a(np.nan_to_num(x))[:2])[1]
    want[1, 1] = np.nan
    same(scale, want)


@pytest.mark.parametrize("format", PAYING)
def test_a_projection(format: str) -> None:
    n, rows, k = 70, 85, 512
    w, codes = copy_of(format, rows, k)
    x = grouped(random_x(n, k))
    kernel = int8_matmul.int8_matmul([w.weight], k)
    (y,) = run(kernel, *x, *w.planes, codes, Out((n, rows), "float32"))
    close(y, grouped_values(x) @ w.values.T, 1e-5)


def test_several_matrices_with_biases_in_other_tiles() -> None:
    parts = [copy_of("Q4_K", 70, 256, 1), copy_of("IQ4_XS", 40, 256, 2)]
    bias = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    x = grouped(random_x(9, 256))
    planes = [a for w, _ in parts for a in w.planes]
    found = []
    for halves in (1, 2):
        knobs = int8_matmul.Int8MatmulKnobs(32, 32, 1, 2, halves)
        kernel = int8_matmul.int8_matmul(
            [w.weight for w, _ in parts], 256, bias=(False, True), knobs=knobs
        )
        found += run(kernel, *x, *planes, *(c for _, c in parts), bias, Out((9, 110), "float32"))
    y, other = found
    assert y.tobytes() == other.tobytes()
    want = grouped_values(x) @ np.concatenate([w.values for w, _ in parts]).T
    want[:, 70:] += bias
    close(y, want, 1e-5)


def test_gate_and_up() -> None:
    n, rows, k = 33, 85, 256
    (gate, gate_codes), (up, up_codes) = copy_of("Q4_K", rows, k, 1), copy_of("Q5_K", rows, k, 2)
    x = grouped(random_x(n, k))
    kernel = int8_matmul.int8_gated_matmul(gate.weight, up.weight, k, act="silu")
    inputs = [*x, *gate.planes, *up.planes, gate_codes, up_codes]
    (h,) = run(kernel, *inputs, Out((n, rows), "float32"))
    values = grouped_values(x)
    gates, ups = values @ gate.values.T, values @ up.values.T
    close(h, gates / (1 + np.exp(-gates)) * ups, 1e-5)
