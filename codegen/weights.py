"""The weights of an artifact: matrices as planes of their layout, vectors in f32; and their file,
written a tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xpuc.artifact import Plane, Range
from xpuc.codegen.lower import weight_formats
from xpuc.codegen.synthetic import matrix_ranges, vector_range
from xpuc.codegen.target import CompileTarget
from xpuc.frontend.gguf import PackedTensor
from xpuc.frontend.model import Model
from xpuc.ir.formats import dequantize, format_of
from xpuc.schedules import target_of

ALIGNMENT = 64  # bytes; kernels load whole vectors without checking
_SAFETENSORS = {
    "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "uint32": "U32",
    "float16": "F16", "float32": "F32", "int32": "I32",
}  # fmt: skip


Ranges = Callable[[], Sequence[Range | None]]


@dataclass(frozen=True)
class Tensor:
    """A tensor on its way to the file: the names and sizes of its planes, and how to make them."""

    planes: tuple[Plane, ...]
    make: Callable[[], Sequence[np.ndarray]]  # arrays of the planes, in order
    ranges: Ranges  # what is drawn where they are made up

    @property
    def n_bytes(self) -> int:
        """In the file, the header apart."""
        return sum(padded(p) * np.dtype(p.dtype).itemsize for p in self.planes)


def tensors_of(
    decode: Any, names: Sequence[str], model: Model, machine: CompileTarget
) -> list[Tensor]:
    """The tensors of these names in operand order: `decode` takes them as its last parameters."""
    kind = machine.facts.kind
    target = target_of(kind)
    matrices = {name: (fmt, rows, columns) for name, fmt, rows, columns in weight_formats(decode)}
    found = []
    for parameter, name in zip((p.name for p in decode.params[-len(names) :]), names, strict=True):
        packed = model.tensors[name]
        if parameter in matrices:
            fmt, rows, columns = matrices[parameter]
            layout = target.planes(fmt, rows, columns)
            planes = tuple(Plane(f"{name}.{p.name}", p.dtype, p.size) for p in layout)
            make = partial(target.pack, fmt, packed.data.reshape(rows, -1))
            ranges: Ranges = partial(matrix_ranges, kind, fmt, columns)
        else:
            planes = (Plane(name, "float32", int(np.prod(packed.shape))),)
            make = partial(_vector, packed)
            ranges = partial(vector_range, name)
        found.append(Tensor(planes, make, ranges))
    return found


def _vector(packed: PackedTensor) -> Sequence[np.ndarray]:
    return (dequantize(format_of(packed.format), packed.data.reshape(1, -1)).reshape(-1),)


def padded(plane: Plane) -> int:
    """Elements of the plane in the file: whole 64 bytes, so that the next plane is aligned."""
    size = np.dtype(plane.dtype).itemsize
    return math.ceil(plane.size * size / ALIGNMENT) * ALIGNMENT // size


def write_weights(path: Path, tensors: Sequence[Tensor], advance: Callable[[int], None]) -> None:
    """Write a safetensors file of 64-byte aligned planes; `advance` is told of bytes written."""
    header: dict[str, object] = {"__metadata__": {"format": "xpuc"}}
    offset = 0
    for plane in (p for t in tensors for p in t.planes):
        size = padded(plane)
        end = offset + size * np.dtype(plane.dtype).itemsize
        header[plane.name] = {
            "dtype": _SAFETENSORS[plane.dtype],
            "shape": [size],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for plane, array in zip(tensor.planes, tensor.make(), strict=True):
                advance(_write(file, plane, array))


def _write(file: BinaryIO, plane: Plane, array: np.ndarray) -> int:
    assert array.dtype == plane.dtype, f"{plane.name}: {array.dtype} instead of {plane.dtype}"
    whole = plane.size <= array.size <= padded(plane)
    assert whole, f"{plane.name}: {array.size} elements instead of {plane.size}"
    data = np.ascontiguousarray(array).reshape(-1)
    file.write(data.data)
    rest = (padded(plane) - data.size) * data.itemsize
    file.write(bytes(rest))
    return data.nbytes + rest
