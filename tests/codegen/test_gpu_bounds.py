"""What kernels of the GPU take, held to stored bounds, and what their machine code is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu_bounds
import pytest
from gpu_bounds import ARCHS, QUANTISED, Bound

from xpuc.bench.predict import INSTRUCTIONS
from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.sass import Sass, disassemble
from xpuc.schedules.cuda import widen
from xpuc.schedules.cuda.int8_matmul import int8_matmul
from xpuc.schedules.cuda.matmul import MatmulKnobs, matmul
from xpuc.schedules.cuda.products import Weight

# Instructions of the hot loop for each weight: those with no scale below that of a block, and the
# K formats. A value of IQ4 is looked up by byte permutations, three for four weights.
PER_WEIGHT = {"Q4_0": 1.6, "Q4_1": 1.6, "Q8_0": 1.6, "IQ4_NL": 3.1, "IQ4_XS": 3.1}
PER_WEIGHT_OF_OTHERS = 3.5


@pytest.fixture(scope="module")
def fatbin() -> Fatbin:
    return gpu_bounds.compiled(gpu_bounds.kernels())


@pytest.fixture(scope="module", params=ARCHS)
def sass(request: pytest.FixtureRequest, fatbin: Fatbin) -> dict[str, Sass]:
    return disassemble(fatbin.code, request.param)


@pytest.mark.slow
def test_every_kernel_keeps_to_its_bound(fatbin: Fatbin) -> None:
    bounds = gpu_bounds.read()
    assert {(row.kernel, row.arch) for row in fatbin.usage} == set(bounds)
    over = [(row, bounds[row.kernel, row.arch]) for row in fatbin.usage]
    assert not [(row, bound) for row, bound in over if not bound.holds(row)]


@pytest.mark.slow
def test_kernels_have_the_instructions_they_are_written_for(sass: dict[str, Sass]) -> None:
    for name, kernel in sass.items():
        if name.startswith(("linear_", "gate_up_", "head_best_")) and "_f32_r" not in name:
            assert kernel.count("IDP.4A") >= 8, name
        if name.startswith(("matmul_", "gated_matmul_", "attention_prefill_")):
            assert kernel.count("HMMA.16816.F32") >= 4, name
        if name.startswith(("int8_matmul_", "int8_gated_matmul_")):
            assert kernel.count("IMMA.16832.S8.S8") >= 64, name
            assert kernel.count("LDGSTS.E.BYPASS.128") >= 8, name
        if name.startswith(("linear_", "gate_up_", "matmul_", "gated_matmul_", "attention_")):
            assert kernel.count("LDG.E.128"), name


@pytest.mark.slow
@pytest.mark.parametrize("format", QUANTISED)
def test_few_instructions_decode_and_multiply_a_weight(format: str, sass: dict[str, Sass]) -> None:
    kernel = sass[gpu_bounds.name_of(gpu_bounds.mat_vec(format, 1))]
    weights = 4 * Sass(format, kernel.hot_loop()).count("IDP.4A")
    assert weights >= 64
    most = min(INSTRUCTIONS[format], PER_WEIGHT.get(format, PER_WEIGHT_OF_OTHERS))
    assert kernel.instructions_per_weight(weights) <= most


@pytest.mark.slow
def test_prompts_take_fewer_instructions_with_a_copy() -> None:
    """Of a warp for 16 x 8 x 32 products: 1 mma of int8, or 2 of f16 in tiles of the same size."""
    k, knobs = gpu_bounds.D_MODEL, MatmulKnobs(128, 128, 2, 4)
    weights = [Weight(format, k) for format in widen.INSTRUCTIONS]
    copied = [int8_matmul([weight], k) for weight in weights]
    packed = [matmul([weight], k, activation="q8", knobs=knobs) for weight in weights]
    code = disassemble(gpu_bounds.compiled([*copied, *packed]).code, "sm_90a")

    def of_tile(kernel: Any) -> float:
        """256 columns of a tile, in 4 steps of the hot loop, are 128 such products a warp."""
        made = code[gpu_bounds.name_of(kernel)]
        step = made.instructions_per_weight(1)
        group = len(made.around_the_hot_loop()) - step if kernel in copied else 0
        return (4 * step + group) / 128

    for weight, with_copy, without in zip(weights, copied, packed, strict=True):
        most, least = widen.INSTRUCTIONS[weight.format]
        assert of_tile(with_copy) <= most < least <= of_tile(without)


def test_a_bound_holds_for_what_takes_no_more() -> None:
    usage = KernelUsage("k", "sm_80", 40, 0, 0, 0, 0, 0)
    assert Bound.of(usage, None) == Bound(48)
    assert Bound(40).holds(usage)
    assert not Bound(39).holds(usage)
    assert not Bound(48).holds(replace(usage, spill_store_bytes=4))
