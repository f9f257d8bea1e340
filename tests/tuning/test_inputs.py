"""The arrays kernels are measured with: of the site's types, and of what a model would give."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gguf
import numpy as np
import pytest
import sites
from activations import values_of
from tiny_models import Q4_K_M, WIDE

from xpuc.codegen.compile import Options, operations
from xpuc.errors import UnsupportedError
from xpuc.schedules import Site, llvm, site_of
from xpuc.schedules.llvm.layouts import layout_of
from xpuc.schedules.packed import FORMATS
from xpuc.tuning.cases import make
from xpuc.tuning.inputs import Case

MIXED = [("Q4_K", 24, 256), ("Q6_K", 8, 256)]
SITES = {
    "linear": (sites.linear(2, [("Q8_0", 20, 64)]), 2),
    "linear, f32": (sites.linear("n", [("F16", 20, 40)], "f32"), 5),
    "linear_group": (sites.linear("n", MIXED, bias=True), 7),
    "gate_up": (sites.gate_up(1, [("Q5_1", 32, 64)] * 2), 1),
    "head_argmax": (sites.head_argmax("m", ("Q4_1", 50, 64)), 3),
    "attention, decode": (sites.attention(3), 3),
    "attention, prefill": (sites.attention("n", kv_dtype="float32"), 40),
    "attention, q8_0": (sites.attention(3, (4, 2, 64), "q8_0"), 3),
}


def assert_fits(where: Site, case: Case) -> None:
    """Arrays of the types of the site's operands and planes, symbols filled in."""
    types = [*where.operands, *(p for w in where.weights for p in w.planes)]
    arrays = [*case.operands, *(p for planes in case.planes for p in planes)]
    for variable, array in zip(types, arrays, strict=True):
        shape = [case.symbols[d.name] if hasattr(d, "name") else int(d) for d in variable.ty.shape]
        assert (list(array.shape), str(array.dtype)) == (shape, str(variable.ty.dtype))


@pytest.mark.parametrize(("where", "rows"), SITES.values(), ids=SITES)
def test_arrays_are_of_the_operands_types(where: Site, rows: int) -> None:
    case = make(where, rows, depth=70)
    assert case.rows == rows
    assert_fits(where, case)
    if where.n is None:
        assert case.symbols["m" if where.op == "head_argmax" else "n"] == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_every_operation_with_knobs_of_a_model_has_inputs(tiny_model, name) -> None:
    path = tiny_model(name, weights=Q4_K_M, **WIDE)
    found, _ = operations(path, Options(cpu="x86-64-v3", ctx=256, max_batch=2))
    with_knobs = [o for o in found if o["knobs"] or o["op"] == "attention"]
    assert {o["op"] for o in with_knobs} == {
        "linear", "linear_group", "gate_up", "head_argmax", "attention"
    }  # fmt: skip
    for operation in with_knobs:
        where = site_of(operation, sites.TARGET, llvm.planes)
        assert_fits(where, make(where, operation["rows"] or 5, depth=100))


@pytest.mark.parametrize("format", FORMATS)
def test_weights_of_every_format_are_of_sane_size(format: str) -> None:
    kind = "q8" if layout_of(format).is_quantised else "f32"
    case = make(sites.linear(1, [(format, 40, 512)], kind), 1)
    weights = gguf.dequantize(case.raw[0], gguf.GGMLQuantizationType[format])
    assert weights.shape == (40, 512)
    assert np.abs(weights).max() <= 1
    assert weights.std(axis=1).min() > 1e-3
    assert len(np.unique(weights, axis=0)) == 40
    for plane, packed in zip(case.planes[0], llvm.pack(format, case.raw[0]), strict=True):
        np.testing.assert_array_equal(plane, packed)


def test_a_quantised_activation_is_one_by_definition() -> None:
    quants, scale, sums, both = make(sites.linear(3, [("Q8_0", 8, 96)]), 3).operands
    assert (quants.min(), quants.max()) >= (-127, 100)
    counts = quants.reshape(3, 3, 2, 16).sum(axis=3)
    np.testing.assert_array_equal(sums, scale * counts.astype(np.float32))
    halves = values_of([quants, scale]).reshape(3, 3, 32).sum(axis=2)
    np.testing.assert_allclose(both.T, halves, rtol=1e-5, atol=1e-6)
    assert len(np.unique(scale)) == scale.size


def test_a_seed_makes_the_same_case() -> None:
    where = sites.linear(1, [("Q4_0", 16, 64)] * 2)
    first, again, other = (make(where, 1, seed=s) for s in (3, 3, 4))
    for a, b, c in zip(first.raw + first.operands, again.raw + again.operands,
                       other.raw + other.operands, strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    assert (first.raw[0] != first.raw[1]).any()


def test_a_matrix_is_never_widened_whole() -> None:
    where = sites.linear(1, [("Q4_0", 4096, 4096)])
    tracemalloc.start()
    case = make(where, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = case.raw[0].nbytes + sum(p.nbytes for p in case.planes[0])
    assert peak < kept + (24 << 20)  # in f32 it has 64 MiB


def indices(case: Case) -> Any:
    """positions, tiles, work, block_table"""
    return case.operands[3:]


def test_rows_of_a_decode_call_end_sequences_of_their_own() -> None:
    case = make(sites.attention(3), 3, depth=300)
    positions, tiles, work, table = indices(case)
    assert positions.tolist() == [299] * 3
    assert tiles.tolist() == [[row, 1, 3 * row, 3] for row in range(3)]
    assert work.tolist() == [[row, 1, row, s] for row in range(3) for s in range(3)]
    assert table.shape == (3, 19)
    assert sorted(table.ravel()) == list(range(57))
    assert (table.ravel() != np.arange(57)).any()


@pytest.mark.parametrize(("rows", "depth"), [(1, 0), (70, 0), (70, 250)])
def test_rows_of_a_prefill_call_stand_in_tiles_of_one_sequence(rows: int, depth: int) -> None:
    case = make(sites.attention("n"), rows, depth=depth)
    positions, tiles, work, table = indices(case)
    assert positions.tolist() == list(range(depth, depth + rows))
    assert table.shape == (1, -(-(depth + rows) // 16))
    covered: list[int] = []
    for first, count, first_work, n_work in tiles.tolist():
        assert 0 < count <= llvm.tile_rows(4, 2, 16)
        covered += range(first, first + count)
        items = work[first_work : first_work + n_work]
        assert items[:, :3].tolist() == [[first, count, 0]] * n_work
        assert items[:, 3].tolist() == list(range((depth + first + count - 1) // 128 + 1))
    assert sorted(covered) == list(range(rows))
    assert tiles[:, 3].sum() == len(work)


@pytest.mark.parametrize(("rows", "fixed"), [(2, True), (5, False)])
def test_what_lies_behind_a_sequence_is_no_number(rows: int, fixed: bool) -> None:
    depth = 37 if fixed else 32  # 37 tokens either way
    case = make(sites.attention(rows if fixed else "n"), rows, depth=depth)
    keys, values, table = case.operands[1], case.operands[2], case.operands[6]
    for blocks in table:
        k = keys[blocks].transpose(0, 3, 1, 2).reshape(48, -1)
        v = values[blocks].transpose(0, 2, 1, 3).reshape(48, -1)
        for tokens in (k, v):
            assert np.isfinite(tokens[:37]).all()
            assert np.isnan(tokens[37:]).all()


def test_scales_behind_a_sequence_are_no_numbers() -> None:
    case = make(sites.attention(2, (4, 2, 64), "q8_0"), 2, depth=37)
    table = case.operands[8]
    for scales in (case.operands[2], case.operands[4]):
        for blocks in table:
            tokens = scales[blocks].transpose(0, 3, 1, 2).reshape(48, -1)
            assert np.isfinite(tokens[:37]).all()
            assert np.isnan(tokens[37:]).all()


def test_an_operation_without_inputs_is_refused() -> None:
    where = sites.site("rms_norm", {"eps": 1e-5}, 1, [["float32", 1, 64]], ["float32", 1, 64])
    with pytest.raises(UnsupportedError) as caught:
        make(where, 1)
    assert caught.value.message == "no inputs for operation rms_norm"
    assert "attention" in caught.value.hint
