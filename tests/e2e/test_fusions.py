"""Every fusion can be switched off by name, and the model says the same without it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from compare import forced_ids, forced_rows, logit_agreement, margins, relative_error
from stepping import in_chunks, row_by_row

from xpuc.artifact import read_manifest
from xpuc.codegen import build as build_module
from xpuc.codegen.compile import Options, compile_model
from xpuc.errors import XpucError
from xpuc.passes import FUSIONS, PIPELINE
from xpuc.runtime.engine import Engine
from xpuc.runtime.model import load_model

pytestmark = pytest.mark.slow

SMALL = {"ctx": 160, "max_chunk": 64, "max_batch": 1, "plainly": True}
BUILDS = {"f32": {"activations": "f32", "kv": "f32"}, "int8": {}}
# qwen2 has biases, qwen3 norms of q and k, gemma3 norms after each block and a window.
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {"layers": 2, "tied": False, "keys": {"attention.sliding_window_pattern": 2}},
}
PROMPTS = [[5 + (i * 37 + start) % 250 for i in range(20)] for start in (0, 91, 200)]
IDS = [5 + (i * 53) % 250 for i in range(60)]


@pytest.fixture(scope="module", params=[(m, b) for m in MODELS for b in BUILDS], ids="-".join)
def build(request, tiny_model, compiled):
    """build(no_fuse=(…)): the artifact of one model in one build."""
    model, kind = request.param
    path = tiny_model(model, weights="Q8_0", **MODELS[model])

    def artifact(no_fuse=()):
        return compiled(path, no_fuse=no_fuse, **SMALL, **BUILDS[kind])

    return artifact


@functools.cache
def greedy(artifact) -> list[list[int]]:
    engine = Engine(load_model(artifact))
    return [engine.generate(p, max_tokens=24, temperature=0).ids for p in PROMPTS]


@functools.cache
def rows(artifact) -> list[np.ndarray]:
    """The logits of a text read row by row, and in chunks."""
    model = load_model(artifact)
    return [row_by_row(model, IDS), in_chunks(model, IDS, [23])]


@pytest.mark.parametrize("names", [*((name,) for name in FUSIONS), FUSIONS], ids="+".join)
def test_the_same_without(names, build):
    whole, without = build(), build(names)
    manifest = read_manifest(without)
    assert all(manifest.decisions["fusions"][name] == {"switched_off": True} for name in names)
    is_exact = manifest.activations == "f32"
    for everything, less in zip(rows(whole), rows(without), strict=True):
        assert logit_agreement(everything, less).holds(0.05)
        assert not is_exact or relative_error(everything, less) < 1e-4
    if is_exact:
        assert greedy(without) == greedy(whole)


def test_every_fusion_finds_something_to_do(build):
    manifest = read_manifest(build())
    idle = {n for n, r in manifest.decisions["fusions"].items() if not r["applied"]}
    assert idle == ({"fuse_quantize"} if manifest.activations == "f32" else set())


@pytest.mark.parametrize("build", [(m, "f32") for m in MODELS], ids="-".join, indirect=True)
def test_the_prompts_leave_no_close_calls(build):
    """Else the order of a sum, and not a wrong fusion, could change the greedy ids."""
    engine = Engine(load_model(build()))
    for prompt, answer in zip(PROMPTS, greedy(build()), strict=True):
        logits = [row.copy() for _, row in engine.teacher_forced(forced_ids(prompt, answer))]
        assert margins(forced_rows(np.array(logits), prompt)).min() > 1e-3


def test_an_unknown_fusion_is_refused_with_the_known_ones(tiny_model, tmp_path):
    with pytest.raises(XpucError) as caught:
        compile_model(
            tiny_model("llama"), out=tmp_path / "m.xpuc", options=Options(no_fuse=("fuse_qvk",))
        )
    assert caught.value.message == "unknown fusion: 'fuse_qvk'"
    assert "did you mean 'fuse_qkv'?" in caught.value.hint
    assert all(name in caught.value.hint for name in FUSIONS)
    assert list(tmp_path.iterdir()) == []


def test_dump_ir_writes_a_numbered_file_for_each_pass(tiny_model, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt  # what follows the passes is not what is tested

    monkeypatch.setattr(build_module, "build", stop)
    options = Options(no_fuse=("fuse_qkv",))
    with pytest.raises(KeyboardInterrupt):
        compile_model(
            tiny_model("llama", weights="Q8_0"),
            out=tmp_path / "m.xpuc", options=options, dump_ir=tmp_path / "ir",
        )  # fmt: skip
    names = [step.name for step in PIPELINE if step.name != "fuse_qkv"]
    expected = [f"{i:02d}_{name}.py" for i, name in enumerate(["graph", *names])]
    files = sorted((tmp_path / "ir").iterdir())
    assert [file.name for file in files] == expected
    first, *_, last = (file.read_text() for file in files)
    assert "xpuc.rms_norm" in first
    assert "xpuc.rms_norm" not in last
    assert "xpuc.block_norm" in last
    assert "xpuc.linear_group" not in last
