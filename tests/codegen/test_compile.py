"""Compiling: what is refused, when the artifact appears, and what is in it."""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from compare import logit_agreement
from kernel_objects import KernelObjects, sharing
from reference import Reference
from safetensors.numpy import load_file
from stepping import in_chunks, row_by_row
from tiny_models import Q4_K_M, WIDE

import xpuc
from xpuc.artifact import (
    CHAT_TEMPLATE,
    LIBRARY,
    MANIFEST,
    RUNTIME,
    TOKENIZER,
    WEIGHTS,
    read_manifest,
)
from xpuc.codegen import compile as compiler
from xpuc.codegen import lower
from xpuc.codegen.build import Built
from xpuc.codegen.compile import Options, buckets, compile_model
from xpuc.codegen.cuda import device_code
from xpuc.codegen.weights import padded
from xpuc.errors import XpucError
from xpuc.ir import ops
from xpuc.ir.builder import Graph
from xpuc.passes.rewrite import Editor
from xpuc.runtime.checks import verify
from xpuc.runtime.model import load_model
from xpuc.schedules import llvm
from xpuc.schedules.llvm.products import LinearKnobs

IDS = [5 + (i * 37) % 250 for i in range(40)]
SMALL = Options(ctx=64, max_batch=2, max_chunk=32)


@pytest.fixture(scope="module")
def checkpoint(tiny_model) -> Path:
    """A tied model of a mixture of formats, 0.6 MB of it."""
    return tiny_model("llama", weights=Q4_K_M, tied=True, **WIDE)


@pytest.fixture(scope="module")
def artifact(checkpoint, tmp_path_factory) -> Path:
    return compile_model(
        checkpoint, out=tmp_path_factory.mktemp("made") / "m.xpuc", options=SMALL
    ).path


@pytest.fixture
def without_llvm(monkeypatch):
    """A build that takes no time, for what happens around it."""

    def build(module: Any, target: Any, path: Path, **_: Any) -> Built:
        path.write_bytes(b"a library")
        return Built(path, {"decode": 64})

    monkeypatch.setattr(compiler.build, "build", build)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "int4"}, "--activations int4: not known"),
        ({"kv": "q8"}, "--kv q8: not known"),
        ({"target": "cuda", "deterministic": True}, "--deterministic: not for cuda"),
        ({"untuned": True, "db": Path("db")}, "--untuned: uses no records, and --db names some"),
        ({"ctx": -1}, "--ctx -1: out of range"),
        ({"ctx": (1 << 20) + 1}, "--ctx 1048577: out of range"),
        ({"max_batch": 0}, "--max-batch 0: out of range"),
        ({"max_batch": 257}, "--max-batch 257: out of range"),
        ({"max_chunk": 15}, "--max-chunk 15: out of range"),
        ({"block_tokens": 24}, "--block-tokens 24: not known"),
        ({"no_fuse": ("fuse_nothing",)}, "unknown fusion: 'fuse_nothing'"),
    ],
)
def test_options_are_refused_before_the_checkpoint_is_opened(changes, message, tmp_path):
    with pytest.raises(XpucError) as caught:
        compile_model(tmp_path / "missing.gguf", options=Options(**changes))
    assert caught.value.message == message
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_heads_that_q8_0_cannot_keep_are_refused(tiny_model, tmp_path):
    checkpoint = tiny_model("llama")
    with pytest.raises(XpucError) as caught:
        compile_model(checkpoint, out=tmp_path / "m.xpuc", options=Options(kv="q8_0"))
    assert caught.value.message == (
        f"{checkpoint}: K/V of 16 columns a head cannot be kept in q8_0, which takes 32 at a time"
    )
    assert caught.value.hint == "compile with --kv f16"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"target": "lvm"}, {"cpu": "znver33"}])
def test_an_unknown_machine_is_refused(changes, checkpoint, tmp_path):
    with pytest.raises(XpucError, match="unknown"):
        compile_model(checkpoint, out=tmp_path / "m.xpuc", options=Options(**changes))
    assert list(tmp_path.iterdir()) == []


def test_the_compiler_for_gpus_is_looked_for_before_any_work(checkpoint, tmp_path, monkeypatch):
    def none():
        raise XpucError("no CUDA compiler", "pip install 'xpuc[cuda]'")

    monkeypatch.setattr(device_code, "find_compiler", none)
    phases = []
    with pytest.raises(XpucError, match="no CUDA compiler"):
        compile_model(
            checkpoint, "cuda", tmp_path / "m.xpuc",
            progress=lambda phase, done, total: phases.append(phase),
        )  # fmt: skip
    assert phases == []


def test_a_link_that_leads_nowhere_is_refused_before_any_work(tmp_path):
    (tmp_path / "m.xpuc").symlink_to("nowhere")
    with pytest.raises(XpucError, match="exists and is not an xpuc artifact"):
        compile_model(tmp_path / "missing.gguf", out=tmp_path / "m.xpuc")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_artifact_is_not_overwritten(kind, tmp_path):
    out = tmp_path / "precious"
    precious = out if kind == "file" else out / "photo"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(XpucError, match="exists and is not an xpuc artifact"):
        compile_model(tmp_path / "missing.gguf", out=out)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("phase", ["lower", "weights", "write"])
def test_a_failure_leaves_nothing_behind(
    failure, phase, checkpoint, tmp_path, without_llvm, monkeypatch
):
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(compiler._Work, phase, fail)
    with pytest.raises(type(failure)):
        compile_model(checkpoint, out=tmp_path / "m.xpuc", options=SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "name"),
    [(Graph, "op"), (ops, "attrs_of"), (Editor, "emit"), (lower._Entry, "launch")],
)
def test_an_interrupt_amid_a_function_stays_one_and_tvm_says_nothing(
    place, name, checkpoint, tmp_path, monkeypatch, capfd
):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_model(checkpoint, out=tmp_path / "m.xpuc", options=SMALL)
    gc.collect()  # the builder's destructor is what warns
    assert capfd.readouterr().err == ""


def test_an_old_artifact_stays_until_the_new_one_is_whole(
    checkpoint, tmp_path, without_llvm, monkeypatch
):
    out = tmp_path / "m.xpuc"
    compile_model(checkpoint, out=out, options=SMALL)
    old = read_manifest(out)
    write = compiler._Work.write

    def look(self: Any, *rest: Any) -> Any:
        compiled = write(self, *rest)
        verify(out, old)
        return compiled

    monkeypatch.setattr(compiler._Work, "write", look)
    options = dataclasses.replace(SMALL, ctx=128)
    compile_model(checkpoint, out=out, options=options)
    assert read_manifest(out).context == 128
    assert list(tmp_path.iterdir()) == [out]

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(compiler._Work, "write", fail)
    with pytest.raises(RuntimeError):
        compile_model(checkpoint, out=out, options=SMALL)
    assert verify(out, read_manifest(out)) > 0
    assert read_manifest(out).context == 128


def test_ctrl_c_while_the_two_change_places_loses_neither(
    checkpoint, tmp_path, without_llvm, monkeypatch
):
    out = tmp_path / "m.xpuc"
    compile_model(checkpoint, out=out, options=SMALL)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        signal.raise_signal(signal.SIGINT)
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_model(checkpoint, out=out, options=dataclasses.replace(SMALL, ctx=128))
    assert read_manifest(out).context == 128
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("synthetic", "n_mib"), [(None, 64), (1, 63)])
def test_a_disk_without_room_is_told_of_before_the_build(
    synthetic, n_mib, checkpoint, tmp_path, monkeypatch
):
    """Beside the weights, where they are written, 64 MiB."""
    usage = SimpleNamespace(free=n_mib << 20)
    monkeypatch.setattr(compiler.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(compiler.build, "build", lambda *_, **__: pytest.fail("was begun"))
    options = dataclasses.replace(SMALL, synthetic=synthetic)
    with pytest.raises(XpucError, match=rf"takes up to {n_mib + 1} MiB; {n_mib} MiB of the"):
        compile_model(checkpoint, out=tmp_path / "m.xpuc", options=options)
    assert list(tmp_path.iterdir()) == []


def test_the_artifact_lies_beside_the_checkpoint(checkpoint, tmp_path, without_llvm):
    path = tmp_path / "model.gguf"
    path.symlink_to(checkpoint)
    assert compile_model(path, options=SMALL).path == tmp_path / "model.xpuc"


@pytest.mark.slow
def test_the_artifact_holds_its_files_and_nothing_else(artifact):
    files = {str(p.relative_to(artifact)) for p in artifact.rglob("*") if p.is_file()}
    ours = {MANIFEST, LIBRARY, WEIGHTS, TOKENIZER, CHAT_TEMPLATE, RUNTIME, "reports/compile.json"}
    licences = {name for name in files - ours if name.startswith("lib/")}
    assert files - licences == ours
    assert "lib/LICENSE.tvm" in licences
    manifest = read_manifest(artifact)
    assert set(manifest.files) == files - {MANIFEST}
    assert verify(artifact, manifest) == sum((artifact / name).stat().st_size for name in files)


@pytest.mark.slow
def test_the_manifest_says_what_was_compiled(artifact, checkpoint):
    manifest = read_manifest(artifact)
    assert manifest.xpuc_version == xpuc.__version__
    assert (manifest.arch, manifest.name) == ("llama", "tiny llama")
    assert (manifest.n_vocab, manifest.d_model, manifest.n_layers) == (287, 256, 2)
    assert (manifest.context, manifest.max_batch, manifest.max_chunk) == (64, 2, 32)
    assert manifest.source["bytes"] == checkpoint.stat().st_size
    assert manifest.kv.layers == ((2, 64, 0),) * 2
    kinds = (("decode", "decode", 1), ("cols_2", "decode", 2), ("prefill", "prefill", 0))
    assert {(e.name, e.kind, e.rows, e.tail) for e in manifest.entry_points} == {
        (name + suffix, kind, rows, tail)
        for name, kind, rows in kinds
        for tail, suffix in (("logits", ""), ("greedy", "_greedy"))
    }
    header = int.from_bytes((artifact / WEIGHTS).read_bytes()[:8], "little") + 8
    assert manifest.memory["weights"] == (artifact / WEIGHTS).stat().st_size - header
    assert manifest.memory["activations"] > 0


@pytest.mark.slow
def test_decisions_are_recorded(artifact):
    decisions = read_manifest(artifact).decisions
    assert decisions == json.loads((artifact / "reports" / "compile.json").read_text())["decisions"]
    # Q4_K q and k with a Q6_K v: all of them read the same activation.
    assert decisions["fusions"]["fuse_qkv"]["applied"] == 2
    assert decisions["int8_peak"]["operations"] > 0
    assert decisions["memory_read"]["bytes"] == 4 * decisions["memory_read"]["elements"]
    operations = decisions["operations"]
    assert {o["origin"] for o in operations} == {"default"}
    assert {o["rows"] for o in operations} == {1, 2, None}
    entries = {entry.name for entry in read_manifest(artifact).entry_points}
    assert set().union(*(o["uses"] for o in operations)) == entries
    (head,) = (o for o in operations if o["op"] == "head_argmax" and o["rows"] == 1)
    assert head["name"] == "head_argmax Q8_0:287x256 rows=1"
    assert head["schedule"] == "head_argmax_x8"
    assert head["reason"] == "no record"
    assert head["knobs"] == dataclasses.asdict(LinearKnobs())
    assert head["kernels"] == ["argmax_287_q8_0_287x256_r1"]
    assert head["uses"] == {"decode_greedy": 1}


@pytest.mark.slow
def test_the_planes_fill_the_weight_file(artifact, checkpoint):
    manifest = read_manifest(artifact)
    data = (artifact / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % 64 == 0
    sizes = [padded(p) * np.dtype(p.dtype).itemsize for p in manifest.planes]
    assert len(data) == header + sum(sizes)
    tensors = sum(t.n_bytes for t in gguf.GGUFReader(checkpoint).tensors)
    assert tensors <= sum(sizes) <= 1.03 * tensors
    assert sum(p.name.startswith("token_embd.weight") for p in manifest.planes) > 0
    assert not [p for p in manifest.planes if p.name.startswith("output.weight")]


@pytest.mark.slow
def test_the_safetensors_library_reads_the_planes(artifact, checkpoint):
    manifest, arrays = read_manifest(artifact), load_file(artifact / WEIGHTS)
    assert set(arrays) == {p.name for p in manifest.planes}
    for plane in manifest.planes:
        found = arrays[plane.name]
        assert (str(found.dtype), found.shape) == (plane.dtype, (padded(plane),))
        assert not found[plane.size :].any()
    packed = next(t for t in gguf.GGUFReader(checkpoint).tensors if t.name == "blk.1.attn_v.weight")
    layout = llvm.planes("Q6_K", *packed.data.shape[:1], 256)
    for plane, array in zip(layout, llvm.pack("Q6_K", packed.data), strict=True):
        found = arrays[f"blk.1.attn_v.weight.{plane.name}"]
        np.testing.assert_array_equal(found[: array.size], array)


def every_row(artifact: Path) -> list[np.ndarray]:
    """The logits of a text read in chunks, and row by row."""
    model = load_model(artifact)
    return [in_chunks(model, IDS, [32]), row_by_row(model, IDS)]


@pytest.mark.slow
def test_kernels_built_one_by_one_and_plainly_compute_the_same(artifact, checkpoint, tmp_path):
    """So that tests may share kernels, and leave LLVM's optimisations out: no bit hangs on them."""
    with sharing(KernelObjects(tmp_path, plainly=True)):
        plain = compile_model(checkpoint, out=tmp_path / "m.xpuc", options=SMALL).path
    np.testing.assert_array_equal(every_row(plain), every_row(artifact))


@pytest.mark.slow
def test_a_plain_cpu_computes_the_same(artifact, checkpoint, tmp_path):
    """Byte products, half floats and fused multiply-adds without instructions for them."""
    options = dataclasses.replace(SMALL, cpu="x86-64-v2")
    with sharing(KernelObjects(tmp_path, plainly=True)):
        plain = compile_model(checkpoint, out=tmp_path / "m.xpuc", options=options).path
    assert "avx" not in read_manifest(plain).target["features"]
    found = every_row(plain)
    np.testing.assert_array_equal(found, every_row(artifact))
    wanted = Reference(checkpoint).forward(IDS)
    assert all(logit_agreement(wanted, logits).holds(0.3) for logits in found)


def test_buckets_are_powers_of_two_and_the_largest_batch():
    assert buckets(1) == (1,)
    assert buckets(6) == (1, 2, 4, 6)
    assert buckets(8) == (1, 2, 4, 8)
