"""Which GPUs code for an architecture runs on, and tensors that are the process's own memory."""

from __future__ import annotations

import numpy as np
import pytest

from xpuc.runtime.places import Process, runs_on


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


def test_a_tensor_of_the_process_is_the_array() -> None:
    place, array = Process(), np.arange(12, dtype=np.int32).reshape(3, 4)
    tensor = place.tensor(array)
    assert tensor.data_ptr() == array.ctypes.data
    place.copy_row(array, tensor, 0, 2)
    np.testing.assert_array_equal(np.from_dlpack(tensor)[2], [0, 1, 2, 3])
