"""The mapped weight file: planes as they were written, nothing copied, nothing written back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from xpuc.artifact import WEIGHTS, Plane
from xpuc.codegen.weights import Tensor, write_weights
from xpuc.errors import ArtifactError
from xpuc.runtime.weights import map_planes

PLANES = (
    Plane("a.weight.qs", "uint8", 100),  # not a whole number of 64 bytes
    Plane("a.weight.d", "float16", 33),
    Plane("b.weight", "float32", 5),
)


def array(plane: Plane) -> np.ndarray:
    return np.arange(1, plane.size + 1).astype(plane.dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = [
        Tensor(PLANES[:2], lambda: [array(p) for p in PLANES[:2]], lambda: (None, None)),
        Tensor(PLANES[2:], lambda: [array(PLANES[2])], lambda: (None,)),
    ]
    path = tmp_path / WEIGHTS
    write_weights(path, tensors, lambda n: None)
    return path


def test_planes_are_what_was_written_in_the_order_asked_for(path):
    for plane, found in zip(PLANES[::-1], map_planes(path, PLANES[::-1]), strict=True):
        assert found.dtype == plane.dtype
        assert found.tolist() == array(plane).tolist()


def test_other_readers_of_safetensors_find_the_same(path):
    from safetensors.numpy import load_file

    found = load_file(path)
    assert found.keys() == {plane.name for plane in PLANES}
    for plane in PLANES:
        assert found[plane.name][: plane.size].tolist() == array(plane).tolist()
        assert not found[plane.name][plane.size :].any()


def test_a_plane_starts_at_a_whole_64_bytes(path):
    assert [found.ctypes.data % 64 for found in map_planes(path, PLANES)] == [0, 0, 0]


def test_nothing_is_written_back(path):
    before = path.read_bytes()
    planes = map_planes(path, PLANES)
    planes[0][:] = 0
    del planes
    assert path.read_bytes() == before


def test_a_mapping_outlives_its_file(path):
    planes = map_planes(path, PLANES)
    shutil.rmtree(path.parent)
    assert planes[1].tolist() == array(PLANES[1]).tolist()


def test_a_mapping_keeps_its_bytes_when_the_file_is_replaced(path):
    planes = map_planes(path, PLANES)
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    assert planes[2].tolist() == array(PLANES[2]).tolist()


def test_a_file_without_a_plane(path):
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: tensor c\.weight is missing"):
        map_planes(path, [*PLANES, Plane("c.weight", "float32", 1)])


@pytest.mark.parametrize("plane", [Plane("b.weight", "float32", 17), Plane("b.weight", "int8", 65)])
def test_a_plane_that_is_shorter_than_the_manifest_says(plane, path):
    with pytest.raises(ArtifactError, match=r"tensor b\.weight is too short") as caught:
        map_planes(path, [plane])
    assert caught.value.hint.endswith(f"xpuc compile MODEL -o {path.parent}")


def test_a_plane_past_the_end_of_the_file(path):
    header = json.dumps({"x": {"dtype": "I8", "shape": [64], "data_offsets": [64, 128]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(127))
    with pytest.raises(ArtifactError, match="tensor x is too short"):
        map_planes(path, [Plane("x", "int8", 64)])
