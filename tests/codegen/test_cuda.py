"""Code for GPUs without one: compiled, packed, reported, and read back as machine code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import tvm
from gpu_kernels import contraction, hopper_product, q4_0_mat_vec, rms_norm, tile_product
from tvm import IRModule, relax

from xpuc.codegen import build, cuda
from xpuc.codegen.cuda import find, nvcc
from xpuc.codegen.cuda.compiler import Compiler, Fatbin
from xpuc.codegen.cuda.sass import Sass, disassemble
from xpuc.codegen.kernels.activation import silu
from xpuc.codegen.target import CompileTarget, resolve
from xpuc.errors import XpucError

pytestmark = pytest.mark.slow

ARCHS = ("sm_80", "sm_90a")
MACHINE = resolve("cuda -arch=" + ",".join(ARCHS))
KERNELS = (
    rms_norm(4096), q4_0_mat_vec(4096, 14336), tile_product(64), contraction(True),
    contraction(False),
)  # fmt: skip
FATBIN_MAGIC = b"\x50\xed\x55\xba"


def made_by(
    compiler: Compiler | None,
    kernels: Sequence[tvm.tirx.PrimFunc],
    machine: CompileTarget = MACHINE,
) -> Fatbin:
    module = IRModule({str(k.attrs["global_symbol"]): k for k in kernels})
    with machine.tvm, cuda.compiling(machine.archs, compiler) as made:
        built = tvm.compile(module, target=machine.tvm, tir_pipeline=cuda.PIPELINE)
    cuda.check_no_source(built.mod)
    assert len(made.fatbins) == 1
    return made.fatbins[0]


@pytest.fixture(scope="module")
def fatbin() -> Fatbin:
    return made_by(find.find_compiler(), KERNELS)


@pytest.fixture(scope="module", params=ARCHS)
def sass(request: pytest.FixtureRequest, fatbin: Fatbin) -> dict[str, Sass]:
    return disassemble(fatbin.code, request.param)


def test_every_kernel_is_reported_on_every_architecture(fatbin: Fatbin) -> None:
    names = {f"{k.attrs['global_symbol']}_kernel" for k in KERNELS}
    assert {(row.kernel, row.arch) for row in fatbin.usage} == {
        (n, a) for n in names for a in ARCHS
    }
    assert fatbin.code.startswith(FATBIN_MAGIC)


def test_kernels_keep_to_their_registers(fatbin: Fatbin) -> None:
    bounds = {"rms_norm_4096": 48, "q4_0_mat_vec_4096x14336": 48, "tile_product_64": 64}
    for row in fatbin.usage:
        assert row.spill_store_bytes == row.spill_load_bytes == row.stack_bytes == 0, row
        assert 0 < row.registers <= bounds.get(row.kernel.removesuffix("_kernel"), 32), row


def test_shared_memory_and_barriers_are_reported(fatbin: Fatbin) -> None:
    rows = {row.kernel: row for row in fatbin.usage}
    assert rows["rms_norm_4096_kernel"].shared_bytes == 8 * 4  # a partial sum a warp
    assert rows["rms_norm_4096_kernel"].barriers == 1
    assert rows["tile_product_64_kernel"].shared_bytes == (16 + 8) * 16 * 2
    assert rows["q4_0_mat_vec_4096x14336_kernel"].shared_bytes == 0


def test_the_mat_vec_multiplies_bytes_and_loads_vectors(sass: dict[str, Sass]) -> None:
    kernel = sass["q4_0_mat_vec_4096x14336_kernel"]
    loop = Sass(kernel.kernel, kernel.hot_loop())
    blocks = loop.count("IDP.4A") // 8  # 8 of 4 weights
    assert blocks >= 1
    assert loop.count("IDP.4A") == 8 * blocks
    assert loop.count("LDG.E.128") == 2 * blocks
    assert kernel.instructions_per_weight(32 * blocks) <= 1.6


def test_tiles_run_on_tensor_cores(sass: dict[str, Sass]) -> None:
    kernel = sass["tile_product_64_kernel"]
    assert kernel.count("HMMA.16816.F32") >= 1
    assert kernel.count("IMMA.16832.S8.S8") >= 1
    assert kernel.count("LDSM.16.M88.4") >= 1
    assert kernel.count("LDGSTS.E.BYPASS.128") >= 2
    assert kernel.count("MUFU.EX2") == 4
    assert kernel.count("STG.E.128") == 1


def test_hopper_copies_tiles_and_multiplies_them_by_warpgroup() -> None:
    made = made_by(None, [hopper_product(128, 4096)], resolve("cuda -arch=sm_90a"))
    (row,) = made.usage
    assert row.stack_bytes == 0
    assert row.registers <= 120
    kernel = disassemble(made.code, "sm_90a")["hopper_product_128x4096_kernel"]
    assert kernel.count("UTMALDG.2D") >= 1, kernel.histogram()
    assert kernel.count("HGMMA.64x128x16.F32") >= 4, kernel.histogram()


def test_a_kernel_for_one_architecture_is_empty_on_the_others() -> None:
    name, kernels = "hopper_product_128x4096_kernel", [hopper_product(128, 4096), tile_product(64)]
    module = IRModule({str(k.attrs["global_symbol"]): k for k in kernels})
    with MACHINE.tvm, cuda.compiling(MACHINE.archs, alone={name: {"sm_90a"}}) as made:
        tvm.compile(module, target=MACHINE.tvm, tir_pipeline=cuda.PIPELINE)
    rows = {(row["kernel"], row["arch"]) for row in made.as_manifest()["kernels"]}
    assert rows == {(name, "sm_90a")} | {("tile_product_64_kernel", arch) for arch in ARCHS}
    (fatbin,) = made.fatbins
    assert disassemble(fatbin.code, "sm_90a")[name].count("HGMMA.64x128x16.F32") >= 4
    assert disassemble(fatbin.code, "sm_80")[name].instructions[-1].opcode in ("EXIT", "BRA", "NOP")
    assert disassemble(fatbin.code, "sm_80")[name].count("LDG") == 0


def test_nothing_is_contracted_or_approximated_unasked(sass: dict[str, Sass]) -> None:
    fused, unfused = sass["fused_kernel"], sass["unfused_kernel"]
    assert fused.count("FFMA") - unfused.count("FFMA") == 1
    assert unfused.count("FMUL") - fused.count("FMUL") == 1
    assert unfused.count("FADD") - fused.count("FADD") == 1
    assert unfused.count("CALL") == 1  # the rest of an exact division
    opcodes = [i.opcode for i in unfused.instructions]
    assert not [op for op in opcodes[: opcodes.index("EXIT")] if ".FTZ" in op]


def test_both_dialects_build_to_one_library(tmp_path: Path) -> None:
    builder, n = relax.BlockBuilder(), tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n, 4096], "float32"))
    w = relax.Var("w", relax.TensorType([4096], "float32"))
    norm = builder.add_func(rms_norm(4096).without_attr("global_symbol"), "norm")
    act = builder.add_func(silu(4096, None).without_attr("global_symbol"), "silu")
    attrs = {"global_symbol": "step", "tir_var_upper_bound": {"n": 64}}
    with builder.function("step", [x, w], attrs=attrs):
        with builder.dataflow():
            y = builder.emit(relax.call_tir(norm, [x, w], [x.ty]))
            out = builder.emit_output(builder.emit(relax.call_tir(act, [y], [x.ty])))
        builder.emit_func_output(out)
    built = build.build(builder.finalize(), MACHINE, tmp_path / "model.so")
    assert built.device is not None
    facts = built.device.as_manifest()
    assert facts["archs"] == list(ARCHS)
    assert {row["kernel"] for row in facts["kernels"]} == {"norm_kernel", "silu_kernel"}
    library = built.path.read_bytes()
    assert library.count(FATBIN_MAGIC) == 1
    assert b"__global__" not in library


def test_source_in_place_of_machine_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")
    with pytest.raises(XpucError, match="CUDA source in place of machine code"):
        made_by(None, KERNELS[-1:])


def test_a_compiler_that_fails_says_so_through_tvm() -> None:
    class Broken:
        name = "broken"

        def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
            return find.find_compiler().compile(source + "\nnonsense", archs)

    with pytest.raises(XpucError, match=r"does not compile for sm_80 \(.*error") as caught:
        made_by(Broken(), KERNELS[-1:])
    assert "report it" in caught.value.hint


def test_a_toolkit_s_nvcc_serves_as_well(fatbin: Fatbin) -> None:
    path = shutil.which("nvcc")
    others = [nvcc.nvcc_at(Path(path))] if path else []
    for compiler in others:
        made = made_by(compiler, KERNELS)
        assert {(r.kernel, r.arch) for r in made.usage} == {
            (r.kernel, r.arch) for r in fatbin.usage
        }
        assert not any(r.stack_bytes for r in made.usage)
        assert set(disassemble(made.code, "sm_80")) == {r.kernel for r in fatbin.usage}
