"""A whole model on the emulated GPU: compiled for cuda, loaded by the runtime, against the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emu import fake_driver
from emu.conftest import SIZES

import xpuc
from xpuc.codegen.compile import Options, compile_model
from xpuc.runtime import places
from xpuc.runtime.engine import Engine

PROMPTS = [[3, 14, 15, 92, 6, 5, 35, 8], list(range(1, 70)), [41]]
NEAR = 0.03  # between the likeliest two: rounding prompts to f16 may choose the other


def loaded(checkpoint: Path, folder: Path, target: str, **options: Any) -> Engine:
    made = compile_model(
        checkpoint, target, folder / f"{target.split()[0]}.xpuc", options=Options(**options)
    )
    return xpuc.load(made.path)


# Tensor cores round prompts to f16, which a random model of few columns makes much of.
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_tiny_model_answers_as_on_the_cpu(
    name: str,
    tiny_model: Callable[..., Path],
    on_gpu: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    checkpoint = tiny_model(name, weights="Q4_0")
    answers = []
    for target in ("llvm", "cuda"):
        before = fake_driver.launches()
        with (
            xpuc.load(on_gpu(name)) if target == "cuda"
            else loaded(checkpoint, tmp_path, target, **SIZES)
        ) as engine:  # fmt: skip
            results = engine.generate(
                PROMPTS, max_tokens=12, temperature=0, ignore_eos=True, logprobs=2
            )
            answers.append([r.logprobs for r in results])
        assert (fake_driver.launches() > before) == (target == "cuda")
    compared = 0
    for got, expected in zip(answers[1], answers[0], strict=True):
        sure = list(itertools.takewhile(lambda p: p.top[0][1] - p.top[1][1] > NEAR, expected))
        compared += len(sure)
        assert [p.id for p in got[: len(sure)]] == [p.id for p in sure]
        logprobs = [p.logprob for p in got[: len(sure)]]
        assert logprobs == pytest.approx([p.logprob for p in sure], abs=0.1)
    assert compared >= 18


@pytest.mark.usefixtures("emulated_compiler")
def test_an_artifact_for_several_architectures_has_the_prompts_of_each(
    tiny_model: Callable[..., Path],
    on_gpu: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = compile_model(
        tiny_model("llama", weights="Q4_0"), "cuda -arch=sm_80,sm_90a", tmp_path / "m.xpuc",
        options=Options(**SIZES),
    )  # fmt: skip
    operations = {o["name"]: o for o in both.manifest.operations}
    assert operations["linear Q4_0:64x64 rows=any"]["schedule"] == "matmul"
    own = operations["linear Q4_0:64x64 rows=any sm_90a"]
    assert {o["op"] for o in operations.values() if "arch" in o} == {
        "linear",
        "linear_group",
        "gate_up",
    }
    assert "prefill_sm_90a_greedy" in operations["head_argmax Q4_0:287x64 rows=any"]["uses"]
    assert own["schedule"] == "matmul_hopper"
    assert set(own["uses"]) == {f"prefill_sm_90a{s}" for s in ("", "_greedy", "_sampled")}

    def answer(artifact: Path) -> tuple[list[float], int]:
        before = fake_driver.launches(f"{own['kernels'][-1]}_kernel")
        with xpuc.load(artifact, chunk_budget_ms=math.inf) as engine:
            result = engine.generate(
                PROMPTS[1], max_tokens=3, temperature=0, ignore_eos=True, logprobs=0
            )
        n = fake_driver.launches(f"{own['kernels'][-1]}_kernel") - before
        return [p.logprob for p in result.logprobs], n

    of_hopper = answer(both.path)
    assert of_hopper == answer(on_gpu("llama"))
    assert of_hopper[1] > 0
    monkeypatch.setattr(places.Gpu, "runs", lambda self, arch: False)
    logprobs, n = answer(both.path)
    assert n == 0
    assert logprobs != of_hopper[0]
    assert logprobs == pytest.approx(of_hopper[0], abs=0.05)


def test_blocks_of_a_gpu_are_copied_stored_and_found_again(
    on_gpu: Callable[[str], Path], tmp_path: Path
) -> None:
    artifact = on_gpu("llama")
    prompt, options = list(range(1, 50)), {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with xpuc.load(artifact, store=tmp_path / "kv") as engine:
        forked = engine.generate(prompt, n=2, seed=1, **(options | {"temperature": 0.8}))
        alone = engine.generate(prompt, **options)
        assert len(forked.others) == 1
    with xpuc.load(artifact, store=tmp_path / "kv") as engine:
        assert engine.generate(prompt, **options).ids == alone.ids
        assert engine.scheduler.kv.counters.store_tokens == 48


SAMPLED: list[dict[str, Any]] = [
    {"seed": 3, "ignore_eos": True},
    {"seed": 4, "temperature": 1.5, "top_k": 64, "top_p": 1.0, "min_p": 0.0},
    {"seed": 0, "temperature": 0, "min_tokens": 4},
    {"seed": 5, "top_k": 3, "n": 2},
]


def sampled(engine: Engine, *, together: bool) -> dict[int, list[list[int]]]:
    """The ids of the answers to requests of SAMPLED."""
    found: dict[int, dict[int, list[int]]] = {}
    for i, options in enumerate(SAMPLED):
        engine.add_request(PROMPTS[0][i:], max_tokens=8, **options)
        while engine.has_work and (not together or options is SAMPLED[-1]):
            for event in engine.step():
                if event.result is not None:
                    place = event.request.params.seed or 0
                    found.setdefault(place, {})[event.index] = event.result.ids
    return {place: [ids for _, ids in sorted(each.items())] for place, each in found.items()}


@pytest.mark.parametrize("together", [False, True])
def test_a_gpu_samples_what_the_host_would(together: bool, on_gpu: Callable[[str], Path]) -> None:
    answers, launches = [], []
    for on_host in (True, False):
        # The same steps in both: a row's bits hang on how its prompt is cut and what runs with it.
        alike = {"chunk_budget_ms": math.inf, "pipeline": not together}
        with xpuc.load(on_gpu("llama"), **alike) as engine:
            assert set(engine.model.tails) == {"logits", "greedy", "sampled"}
            if on_host:
                engine.model.tails = ("logits",)
            kernel = f"sample_{engine.model.n_vocab}_kernel"
            before = fake_driver.launches(kernel)
            answers.append(sampled(engine, together=together))
            launches.append(fake_driver.launches(kernel) - before)
    assert answers[0] == answers[1]
    assert launches[0] == 0
    assert launches[1] >= 8


@pytest.mark.model
@pytest.mark.usefixtures("emulated_compiler")
def test_smollm2_gives_the_tokens_of_the_cpu(
    smollm2_gguf: Path, golden: Callable[[str], Any], tmp_path: Path
) -> None:
    """Those that tests/e2e/test_models.py holds the CPU to."""
    sizes = {"ctx": 256, "max_batch": 1, "max_chunk": 64}
    with loaded(smollm2_gguf, tmp_path, "cuda -arch=sm_90a", **sizes) as engine:
        answer = engine.generate("The capital of France is", max_tokens=16, temperature=0)
    assert answer.ids == golden("smollm2_answer.json")
    assert len(answer.ids) == 16
