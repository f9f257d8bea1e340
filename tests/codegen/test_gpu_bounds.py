"""What kernels of the GPU take, held to stored bounds, and what their machine code is made of."""

from __future__ import annotations

import re
from dataclasses import replace

import gpu_bounds
import pytest
from gpu_bounds import ARCHS, QUANTISED, Bound
from tvm.tirx import PrimFunc, Var

from xpuc.bench.predict import INSTRUCTIONS
from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.sass import Sass, disassemble
from xpuc.schedules.cuda import widen
from xpuc.schedules.cuda.grid import axes
from xpuc.schedules.cuda.int8_matmul import int8_matmul
from xpuc.schedules.cuda.matmul import MatmulKnobs, matmul
from xpuc.schedules.cuda.products import Weight

# Instructions of the hot loop for each weight: those with no scale below that of a block, and the
# K formats. A value of IQ4 is looked up by byte permutations, three for four weights.
PER_WEIGHT = {"Q4_0": 1.6, "Q4_1": 1.6, "Q8_0": 1.6, "IQ4_NL": 3.0, "IQ4_XS": 3.0}
PER_WEIGHT_OF_OTHERS = 3.5


# Kinds of instructions whose order matters, by the beginning of their opcodes: the first that fits.
MERGE = {
    r"LDG\..*CONSTANT": "c", r"LDG\.": "r", r"STG\.": "w", r"BAR\.": "b", r"MEMBAR\.": "f",
    r"ATOMG\.": "a", r"CCTL\.IVALL": "i",
}  # fmt: skip
PRODUCTS = {
    r"HGMMA\.": "p", r"WARPGROUP\.DEPBAR\.": "w", r"SYNCS\.ARRIVE\.TRANS64\.A1T0": "r",
    r"STG\.": "s",
}  # fmt: skip


def kinds(kernel: Sass, letters: dict[str, str]) -> str:
    """Letters of a kernel's instructions, in order; of others nothing."""
    found = (
        next((letter for opcode, letter in letters.items() if re.match(opcode, i.opcode)), "")
        for i in kernel.instructions
    )
    return "".join(found)


@pytest.fixture(scope="module")
def fatbin() -> Fatbin:
    return gpu_bounds.compiled(gpu_bounds.kernels())


@pytest.fixture(scope="module")
def of_hopper() -> Fatbin:
    return gpu_bounds.compiled(gpu_bounds.hopper_kernels(), gpu_bounds.HOPPER)


@pytest.fixture(scope="module", params=ARCHS)
def sass(request: pytest.FixtureRequest, fatbin: Fatbin) -> dict[str, Sass]:
    return disassemble(fatbin.code, request.param)


def in_tiles_of_128(weight: Weight) -> PrimFunc:
    """A product on tensor cores that decodes the weights, in tiles like those of int8."""
    knobs = MatmulKnobs(128, 128, 2, 4)
    return matmul([weight], gpu_bounds.D_MODEL, activation="q8", knobs=knobs)


@pytest.fixture(scope="module")
def decoding() -> dict[str, Sass]:
    """Such products for the formats that have copies, as sm_90a has them."""
    weights = [Weight(format, gpu_bounds.D_MODEL) for format in widen.INSTRUCTIONS]
    fatbin = gpu_bounds.compiled([in_tiles_of_128(weight) for weight in weights])
    return disassemble(fatbin.code, "sm_90a")


@pytest.mark.slow
def test_every_kernel_keeps_to_its_bound(fatbin: Fatbin, of_hopper: Fatbin) -> None:
    bounds, usage = gpu_bounds.read(), (*fatbin.usage, *of_hopper.usage)
    assert {(row.kernel, row.arch) for row in usage} == set(bounds)
    over = [(row, bounds[row.kernel, row.arch]) for row in usage]
    assert not [(row, bound) for row, bound in over if not bound.holds(row)]


@pytest.mark.slow
def test_kernels_have_the_instructions_they_are_written_for(sass: dict[str, Sass]) -> None:
    for name, kernel in sass.items():
        if name.startswith(("linear_", "gate_up_", "head_best_")) and "_f32_r" not in name:
            assert kernel.count("IDP.4A") >= 8, name
        if name.startswith(("matmul_", "gated_matmul_", "attention_prefill_")):
            assert kernel.count("HMMA.16816.F32") >= 4, name
        if name.startswith(("int8_matmul_", "int8_gated_matmul_")):
            assert kernel.count("IMMA.16832.S8.S8") >= 32, name
            assert kernel.count("LDGSTS.E.BYPASS.128") >= 8, name
        if name.startswith(("linear_", "gate_up_", "matmul_", "gated_matmul_", "attention_")):
            assert kernel.count("LDG.E.128"), name


@pytest.mark.slow
def test_products_of_warpgroups_overlap_and_read_what_was_copied(of_hopper: Fatbin) -> None:
    products = 0
    for name, kernel in disassemble(of_hopper.code, "sm_90a").items():
        if name.startswith("widen_rows_"):
            continue
        products += 1
        rows = 96 if "gated_matmul_silu_bf16" in name else 128
        count = kernel.count(f"HGMMA.64x{rows}x16.F32")
        assert count >= 8, name
        # ptxas waits for each product at once where it cannot tell what a factor's registers hold.
        assert kernel.count("WARPGROUP.DEPBAR.LE") <= count / 4, name
        assert kernel.count("UTMALDG.2D") >= 2, name
        assert kernel.count("SYNCS.PHASECHK.TRANS64.TRYWAIT") >= 2, name
        assert not kernel.count("HMMA"), name
        order = kinds(kernel, PRODUCTS)
        assert "r" in order, name
        assert not re.search("p[^w]*[rs]", order), f"{name}: released or stored before a wait"
        assert kernel.count("LDG.E.128") or kernel.count("LDG.E.64"), name
    assert products > len(QUANTISED)


@pytest.mark.slow
def test_the_last_block_reads_what_the_others_have_written(sass: dict[str, Sass]) -> None:
    """Parts are written and a barrier passed before a fence and the arrival; after it the cache
    forgets what it held and a barrier is passed before they are read, by no load that takes its
    data for constant."""
    merging = [name for name in sass if name.startswith("attention_decode_")]
    assert merging
    for name in merging:
        order = kinds(sass[name], MERGE)
        assert re.fullmatch("[cwb]+wb+faiw?b[rwb]*r[rwb]*", order), f"{name}: {order}"


@pytest.mark.slow
@pytest.mark.parametrize("format", QUANTISED)
def test_few_instructions_decode_and_multiply_a_weight(format: str, sass: dict[str, Sass]) -> None:
    kernel = sass[gpu_bounds.name_of(gpu_bounds.mat_vec(format, 1))]
    weights = 4 * Sass(format, kernel.hot_loop()).count("IDP.4A")
    assert weights >= 64
    most = min(INSTRUCTIONS[format], PER_WEIGHT.get(format, PER_WEIGHT_OF_OTHERS))
    assert kernel.instructions_per_weight(weights) <= most


@pytest.mark.slow
def test_prompts_take_fewer_instructions_with_a_copy(
    sass: dict[str, Sass], decoding: dict[str, Sass]
) -> None:
    """Of a warp for 16 x 8 x 32 products, of which a step of both kernels has 32: 64 columns.

    With a copy there are scales to multiply with after the 4 steps of a group.
    """
    for format, (most, least) in widen.INSTRUCTIONS.items():
        weight = Weight(format, gpu_bounds.D_MODEL)
        copied = sass[gpu_bounds.name_of(int8_matmul([weight], gpu_bounds.D_MODEL))]
        packed = decoding[gpu_bounds.name_of(in_tiles_of_128(weight))]
        step = copied.instructions_per_weight(32)
        scaling = len(copied.around_the_hot_loop()) / 128 - step / 4
        assert step + scaling <= most < least <= packed.instructions_per_weight(32), format


@pytest.mark.slow
def test_grids_have_room_for_the_largest_steps() -> None:
    """Of what xpuc compile takes: 4096 rows a chunk, 256 sequences; here each of 131 072 tokens."""
    largest = {"n": 4096, "m": 4096, "t": 4096 + 256, "w": 256 * 1024, "c": 1 << 30}
    for kernel in (*gpu_bounds.kernels(), *gpu_bounds.hopper_kernels()):
        shapes = [d for param in kernel.params for d in param.ty.shape]
        sizes = {d: largest[d.name] for d in shapes if isinstance(d, Var) and d.name in largest}
        first, *others = axes(kernel, sizes)
        assert first < 1 << 31, gpu_bounds.name_of(kernel)
        assert all(blocks < 1 << 16 for blocks in others), gpu_bounds.name_of(kernel)


def test_a_bound_holds_for_what_takes_no_more() -> None:
    usage = KernelUsage("k", "sm_80", 40, 0, 0, 0, 0, 0)
    assert Bound.of(usage, None) == Bound(48)
    assert Bound(40).holds(usage)
    assert not Bound(39).holds(usage)
    assert not Bound(48).holds(replace(usage, spill_store_bytes=4))
