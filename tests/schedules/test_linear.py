"""Linear kernels of every format against gguf's decoding, and their bits against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from kernel_calls import build, call
from packed_weights import (
    QUICK,
    Packed,
    activation,
    columns_for,
    of_rows,
    packed,
    random_x,
    relative_error,
)

from xpuc.schedules.llvm.isa import Generic, Isa, isa_for
from xpuc.schedules.llvm.layouts import layout_of
from xpuc.schedules.llvm.linear import linear
from xpuc.schedules.llvm.products import LinearKnobs, Weight
from xpuc.schedules.packed import FORMATS

AVX2 = isa_for(frozenset({"avx2", "fma"}))
QUANTISED = tuple(f for f in FORMATS if layout_of(f).is_quantised)
CASES = [(f, "q8") for f in QUANTISED] + [(f, "f32") for f in FORMATS]


def kernel(
    weights: tuple[Weight, ...],
    k: int,
    n: int | None,
    kind: str = "q8",
    *,
    bias: tuple[bool, ...] | None = None,
    isa: Isa = AVX2,
    knobs: LinearKnobs = LinearKnobs(),  # noqa: B008
) -> Any:
    bias = bias or (False,) * len(weights)
    return linear(weights, k, n, activation=kind, bias=bias, isa=isa, knobs=knobs)


def run(w: Packed, n: int | None, kind: str, x: Any, **options: Any) -> Any:
    built = build(kernel((w.weight,), x.shape[1], n, kind, **options))
    return outputs(built, w, kind, x)


def outputs(built: Any, w: Packed, kind: str, x: Any) -> Any:
    args, _ = activation(kind, x)
    (y,) = call(built, [*args, *w.planes], [((len(x), w.weight.rows), "float32")])
    return y


def check(format: str, kind: str, static: tuple[int, ...], symbolic: tuple[int, ...]) -> None:
    """Every result is right, and row 0 has the same bits in all of them."""
    k = columns_for(format)
    w = packed(format, 20, k)
    x = random_x(70, k)
    _, meant = activation(kind, x)
    want = meant @ w.values.T
    any_rows = build(kernel((w.weight,), k, None, kind))
    first = outputs(any_rows, w, kind, x[:1])
    results = [run(w, n, kind, x[:n]) for n in static]
    results += [outputs(any_rows, w, kind, x[:n]) for n in symbolic]
    for y in results:
        assert relative_error(y, want[: len(y)]) < 1e-6
        np.testing.assert_array_equal(y[0], first[0])


@pytest.mark.parametrize("format", QUICK)
def test_one_row_and_many(format: str) -> None:
    check(format, "q8", (1,), (2, 70))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "kind"), CASES)
def test_every_format_and_number_of_rows(format: str, kind: str) -> None:
    check(format, kind, (1, 2, 5, 64), (2, 5, 64, 70))


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("k", [7, 32, 75])
def test_float_weights_take_any_number_of_columns(format: str, k: int) -> None:
    w = packed(format, 9, k)
    x = np.random.default_rng(k).standard_normal((2, k), np.float32)
    assert relative_error(run(w, 2, "f32", x), x.astype(np.float64) @ w.values.T) < 1e-6


@pytest.mark.parametrize("n", [1, None])
def test_a_group_of_formats_with_biases_and_tails(n: int | None) -> None:
    group = [packed("Q5_0", 44, 256, 1), packed("Q4_K", 9, 256, 2), packed("Q8_0", 24, 256, 3)]
    x = random_x(3 if n is None else n, 256)
    rng = np.random.default_rng(4)
    biases = [rng.standard_normal(w.weight.rows, np.float32) for w in (group[0], group[1])]
    built = build(kernel(tuple(w.weight for w in group), 256, n, bias=(True, True, False)))
    args, meant = activation("q8", x)
    planes = [p for w in group for p in w.planes]
    (y,) = call(built, [*args, *planes, *biases], [((len(x), 77), "float32")])
    want = np.concatenate([meant @ w.values.T for w in group], axis=1)
    want[:, :53] += np.concatenate(biases)
    assert relative_error(y, want) < 1e-6


def test_a_group_has_the_bits_of_its_members() -> None:
    group = [packed("Q4_1", 48, 160, 1), packed("Q8_0", 16, 160, 2)]
    x = random_x(1, 160)
    args, _ = activation("q8", x)
    built = build(kernel(tuple(w.weight for w in group), 160, 1))
    (y,) = call(built, [*args, *group[0].planes, *group[1].planes], [((1, 64), "float32")])
    apart = np.concatenate([run(w, 1, "q8", x) for w in group], axis=1)
    np.testing.assert_array_equal(y, apart)


def test_extreme_bytes_do_not_overflow() -> None:
    rows = np.zeros((8, 4, 34), np.uint8)
    rows[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    rows[..., 2:] = np.array([-128, 127], np.int8).view(np.uint8)[np.arange(8) // 4][:, None, None]
    w = of_rows("Q8_0", rows.reshape(8, -1))
    x = np.ones((2, 128), np.float32)
    x[1] = -1
    for isa in (AVX2, Generic()):
        y = run(w, 2, "q8", x, isa=isa)
        np.testing.assert_allclose(y, x @ w.values.T, rtol=1e-6)


@pytest.mark.parametrize("format", [*QUICK, "IQ4_NL", "Q2_K"])
def test_instructions_do_not_change_the_bits(format: str) -> None:
    k = columns_for(format)
    w, x = packed(format, 16, k), random_x(1, k)
    np.testing.assert_array_equal(run(w, 1, "q8", x), run(w, 1, "q8", x, isa=Generic()))


@pytest.mark.parametrize(("n", "unroll"), [(1, 1), (1, 3), (None, 8)])
def test_knobs_do_not_change_the_bits(n: int | None, unroll: int) -> None:
    w, x = packed("Q2_K", 16, 256), random_x(1 if n else 11, 256)
    plain = run(w, n, "q8", x)
    tuned = run(w, n, "q8", x, knobs=LinearKnobs(prefetch_bytes=0, m_tile=4, unroll=unroll))
    np.testing.assert_array_equal(plain, tuned)


@pytest.mark.parametrize("rows", [8, 40, 48])
@pytest.mark.parametrize("format", ["Q4_1", "F16"])
def test_row_groups_side_by_side_do_not_change_the_bits(format: str, rows: int) -> None:
    kind = "q8" if layout_of(format).is_quantised else "f32"
    w, x = packed(format, rows, 96), random_x(1, 96)
    one, two = (run(w, 1, kind, x, knobs=LinearKnobs(groups=groups)) for groups in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("cpu", "features", "wanted", "unwanted"),
    [
        ("znver1", {"avx2", "fma"}, "vpmaddubsw", "vpdpbusd"),
        ("alderlake", {"avx2", "avxvnni"}, "vpdpbusd", "vpmaddubsw"),
        ("znver4", {"avx2", "avx512vl", "avx512vnni"}, "vpdpbusd", "vpmaddubsw"),
        ("sapphirerapids", {"avx512vl", "avx512vnni"}, "vpdpbusd", "vpmaddubsw"),
        ("x86-64", set(), "pmullw", "pmaddubsw"),
    ],
)
@pytest.mark.parametrize("format", ["Q4_1", "Q8_0"])
def test_the_instructions_of_each_cpu_are_used(
    cpu: str, features: set[str], wanted: str, unwanted: str, format: str
) -> None:
    asm = assembly(format, {"mcpu": cpu}, frozenset(features))
    assert wanted in asm
    assert unwanted not in asm
    assert "imul" not in inner_loop(asm, wanted)


def test_arm_is_compiled_for() -> None:
    arm = {"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}
    asm = assembly("Q4_1", arm, frozenset())
    assert "fmla" in asm


def assembly(format: str, target: dict[str, str], features: frozenset[str]) -> str:
    func = kernel((Weight(format, 16),), 64, 1, isa=isa_for(features))
    compiled = tvm.compile(func, target=tvm.target.Target({"kind": "llvm", **target}))
    return str(compiled.mod.inspect_source("asm"))


def inner_loop(asm: str, instruction: str) -> str:
    """The basic blocks that use an instruction."""
    return "\n".join(block for block in asm.split("\n.LBB") if instruction in block)
