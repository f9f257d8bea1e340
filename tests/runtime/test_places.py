"""Which GPUs code for an architecture runs on, and tensors that are the process's own memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cli_runs import manifest

from xpuc.errors import ArtifactError
from xpuc.runtime import nvidia
from xpuc.runtime.places import Process, own_arch, place_of, runs_on


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", "8.0", True), ("sm_80", "8.6", True), ("sm_89", "8.6", False),
        ("sm_80", "9.0", False), ("sm_90", "9.0", True), ("sm_90a", "9.0", True),
        ("sm_100", "10.0", True), ("sm_120", "12.0", True), ("sm_100", "12.0", False),
    ],
)  # fmt: skip
def test_code_runs_on_later_gpus_of_its_major_version(
    arch: str, capability: str, runs: bool
) -> None:
    assert runs_on(arch, capability) is runs


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ("8.0", "sm_80"), ("8.6", "sm_86"), ("8.7", "sm_86"), ("8.9", "sm_89"), ("9.0", "sm_90a"),
        ("10.0", "sm_100"), ("10.3", "sm_100"), ("12.0", "sm_120"), ("12.1", "sm_120"),
    ],
)  # fmt: skip
def test_of_a_gpu_that_is_newer_than_the_compiler_the_newest_that_runs(
    capability: str, arch: str
) -> None:
    assert own_arch(capability) == arch


def test_an_artifact_without_code_for_the_gpu_says_what_to_compile_it_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = nvidia.GpuFacts("RTX", "12.1", "13.0", 1 << 30, 1 << 30)
    monkeypatch.setattr(nvidia, "first_gpu", lambda: gpu)
    made = manifest(target={"kind": "cuda"}, decisions={"device": {"archs": ["sm_80", "sm_90a"]}})
    with pytest.raises(ArtifactError) as refused:
        place_of(made, Path("m.xpuc"))
    assert refused.value.message == (
        "m.xpuc: has code for sm_80, sm_90a; RTX is of compute capability 12.1"
    )
    assert refused.value.hint == "compile it with --target 'cuda -arch=sm_120'"


@pytest.mark.parametrize("capability", ["7.5", "11.0"])
def test_a_gpu_that_no_code_is_made_for(capability: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        own_arch(capability)
    assert refused.value.message.endswith(f"compute capability {capability}")
    assert "sm_80, " in refused.value.hint


def test_a_tensor_of_the_process_is_the_array() -> None:
    place, array = Process(), np.arange(12, dtype=np.int32).reshape(3, 4)
    tensor = place.tensor(array)
    assert tensor.data_ptr() == array.ctypes.data
    place.copy_row(array, tensor, 0, 2)
    np.testing.assert_array_equal(np.from_dlpack(tensor)[2], [0, 1, 2, 3])
