"""Int8 copies of weights and the products of prompts with them, on the emulated GPU."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from activations import q8a, values_of
from emu.device import Out, run
from emu.gpu_weights import Matrix, error, matrix
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


def copy_of(format: str, rows: int, k: int, seed: int = 0) -> tuple[Matrix, Any]:
    """A random matrix, and its copy made by the kernel, int8 (rows * k,)."""
    made = matrix(format, rows, k, seed)
    names = [plane.name for plane in layouts.planes(format, rows, k)]
    planes = dict(zip(names, made.planes, strict=True))
    elements = [planes[name] for name in element_planes(format)]
    (codes,) = run(widen(format), *elements, Out((rows * k,), "int8"))
    return made, codes


@pytest.mark.parametrize("format", PAYING)
def test_a_copy_is_exact(format: str) -> None:
    """Codes times the format's scales, less its minimums, are the weights to the last bit."""
    rows, k = 5, 768
    raw, _ = random_matrix(np.random.default_rng(0), format, (rows, k), 0.05)
    raw = raw.view(np.uint8)
    planes = layouts.pack(format, raw)
    elements = [planes[name] for name in element_planes(format)]
    (codes,) = run(widen(format), *elements, Out((rows * k,), "int8"))
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


def grouped(x: Any) -> list[Any]:
    """What the kernel makes of the rows' q8a."""
    n, k = x.shape
    return run(regroup(k), *q8a(x), *(Out(shape, dtype) for _, shape, dtype in shapes(n, k)))


def grouped_values(tensors: list[Any]) -> Any:
    """What the codes stand for, f64 (n, k)."""
    codes, scale, _ = tensors
    return codes.astype(np.float64) * np.repeat(scale.T.astype(np.float64), GROUP, axis=1)


def test_activations_in_groups() -> None:
    n, k = 7, 512
    quantised = q8a(random_x(n, k))
    codes, scale, sums = grouped(random_x(n, k))
    halves = quantised[1].transpose(1, 0, 2).reshape(n, k // GROUP, 16)
    want = halves.max(2)
    np.testing.assert_array_equal(scale, want.T)
    by = np.divide(halves, want[..., None], where=want[..., None] > 0, out=np.zeros_like(halves))
    given = quantised[0].transpose(1, 0, 2).reshape(n, k // GROUP, 16, 16)
    np.testing.assert_array_equal(
        codes, np.rint(given * by[..., None].astype(np.float32)).astype(np.int8).reshape(n, k)
    )
    total = codes.reshape(n, k // GROUP, 8, 32).sum(3, dtype=np.int64)
    digits = sums.astype(np.int64).transpose(1, 0, 2)
    np.testing.assert_array_equal(digits[..., :8] + digits[..., 8:], total)
    assert np.abs(digits[..., :8]).max() <= 32
    assert not (digits[..., 8:] % 64).any()
    assert error(grouped_values([codes, scale, sums]), values_of(quantised)) < 0.5 / 127


def test_a_nan_is_kept_by_its_group() -> None:
    x = random_x(3, 512)
    x[1, 300] = np.nan
    with np.errstate(all="ignore"):
        _, scale, _ = grouped(x)
    assert np.isnan(scale).tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("format", PAYING)
def test_a_projection(format: str) -> None:
    n, rows, k = 70, 85, 512
    w, codes = copy_of(format, rows, k)
    x = grouped(random_x(n, k))
    kernel = int8_matmul.int8_matmul([w.weight], k)
    (y,) = run(kernel, *x, *w.planes, codes, Out((n, rows), "float32"))
    assert error(y, grouped_values(x) @ w.values.T) < 1e-5


def test_several_matrices_with_biases_in_other_tiles() -> None:
    parts = [copy_of("Q4_K", 70, 256, 1), copy_of("IQ4_XS", 40, 256, 2)]
    bias = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    x = grouped(random_x(9, 256))
    knobs = int8_matmul.Int8MatmulKnobs(rows=32, columns=32, row_warps=1, column_warps=2)
    kernel = int8_matmul.int8_matmul(
        [w.weight for w, _ in parts], 256, bias=(False, True), knobs=knobs
    )
    planes = [a for w, _ in parts for a in w.planes]
    (y,) = run(kernel, *x, *planes, *(c for _, c in parts), bias, Out((9, 110), "float32"))
    want = grouped_values(x) @ np.concatenate([w.values for w, _ in parts]).T
    want[:, 70:] += bias
    assert error(y, want) < 1e-5


def test_gate_and_up() -> None:
    n, rows, k = 33, 85, 256
    (gate, gate_codes), (up, up_codes) = copy_of("Q4_K", rows, k, 1), copy_of("Q5_K", rows, k, 2)
    x = grouped(random_x(n, k))
    kernel = int8_matmul.int8_gated_matmul(gate.weight, up.weight, k, act="silu")
    inputs = [*x, *gate.planes, *up.planes, gate_codes, up_codes]
    (h,) = run(kernel, *inputs, Out((n, rows), "float32"))
    values = grouped_values(x)
    gates, ups = values @ gate.values.T, values @ up.values.T
    assert error(h, gates / (1 + np.exp(-gates)) * ups) < 1e-5
