"""The weights of an artifact: its file, mapped into memory, or made up where it has none; and the
int8 copies that prompts are multiplied with."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xpuc.artifact import WEIGHTS, Manifest, Plane, compile_again
from xpuc.errors import ArtifactError
from xpuc.runtime.synthetic import made_up_planes


def planes_of(directory: Path, manifest: Manifest) -> Iterable[np.ndarray]:
    """Every plane of an artifact as a one-dimensional array, in operand order."""
    if manifest.synthetic is not None:
        return made_up_planes(manifest.planes, manifest.synthetic)
    return map_planes(directory / WEIGHTS, manifest.planes)


def map_planes(path: Path, planes: Sequence[Plane]) -> list[np.ndarray]:
    """Every plane as a one-dimensional array over the mapped file, in operand order: no copies.

    The mapping is private: the arrays may be handed to code that wants them writable, and the file
    cannot change through them.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = 8 + length
    arrays = []
    for plane in planes:
        entry = header.get(plane.name)
        if entry is None:
            raise ArtifactError(
                f"{path}: tensor {plane.name} is missing", compile_again(path.parent)
            )
        begin, end = entry["data_offsets"]
        dtype = np.dtype(plane.dtype)
        if end - begin < plane.size * dtype.itemsize or start + end > len(data):
            raise ArtifactError(
                f"{path}: tensor {plane.name} is too short", compile_again(path.parent)
            )
        arrays.append(np.frombuffer(data, dtype, plane.size, start + begin))
    return arrays


def make_copies(vm: Any, manifest: Manifest, weights: Sequence[Any]) -> list[Any]:
    """The int8 copies, in operand order; `weights` are the tensors of the manifest's planes."""
    planes = dict(zip((plane.name for plane in manifest.planes), weights, strict=True))
    return [vm[copy.entry](*(planes[name] for name in copy.planes)) for copy in manifest.copies]
