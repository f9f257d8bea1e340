"""GGUF files, versions 2 and 3: metadata and memory-mapped packed tensors, split files included.

Written from https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Opening checks the whole
structure and copies none of it: a value, string or weight is read when it is asked for.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from xpuc.errors import FileError
from xpuc.frontend.gguf_bytes import damaged, shown
from xpuc.frontend.gguf_metadata import Metadata
from xpuc.frontend.gguf_part import Part, open_part
from xpuc.frontend.gguf_tensors import PackedTensor

__all__ = ["GgufFile", "Metadata", "PackedTensor", "open_gguf"]

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_DIGEST_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An opened model: metadata, and tensors by name in the order of the file.

    Of a split model `paths` are all parts, `tensors` those of all parts, and the rest is the first
    part's. `n_bytes` counts all parts.
    """

    paths: tuple[Path, ...]
    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, PackedTensor]
    n_bytes: int
    _maps: tuple[mmap.mmap, ...] = field(repr=False)

    def digest(self, progress: Callable[[int], None] | None = None) -> str:
        """XXH3-128 of the bytes of all parts, one behind the other, in hexadecimal.

        `progress` is called with the number of bytes of each chunk after it.
        """
        state = xxhash.xxh3_128()
        for data in self._maps:
            with memoryview(data) as view:
                for start in range(0, len(view), _DIGEST_CHUNK_BYTES):
                    with view[start : start + _DIGEST_CHUNK_BYTES] as chunk:
                        state.update(chunk)
                        if progress is not None:
                            progress(len(chunk))
        return state.hexdigest()


def open_gguf(path: str | os.PathLike[str], *, strict: bool = True) -> GgufFile:
    """Opens a GGUF file, or all parts of a split one, given any part.

    FileError: the file is missing, malformed or incomplete; the message names the key or tensor and
    the byte. UnsupportedError: it is well formed, but of another version or byte order, or a tensor
    has a type that xpuc cannot decode. With `strict=False` such a tensor is kept, so that it can be
    listed, as long as the type is one of ggml's.
    """
    part = open_part(Path(path), strict=strict)
    parts = _all_parts(part, strict=strict)
    first = parts[0]
    return GgufFile(
        paths=tuple(part.path for part in parts),
        version=first.version,
        alignment=first.alignment,
        metadata=first.metadata,
        tensors=_merge_tensors(parts),
        n_bytes=sum(len(part.data) for part in parts),
        _maps=tuple(part.data for part in parts),
    )


def _all_parts(part: Part, *, strict: bool) -> list[Part]:
    count = part.metadata.integer(_COUNT, 1)
    if count < 2:
        return [part]
    paths = _part_paths(part, count)
    missing = [path for path in paths if not path.exists()]
    if missing:
        names = ", ".join(path.name for path in missing[:3]) + ", ..." * (len(missing) > 3)
        raise FileError(
            f"{part.path}: is one of {count} parts; missing: {names}",
            f"put all parts into {part.path.parent}",
        )
    no = part.metadata.integer(_NO, 0)
    parts = [part if i == no else open_part(path, strict=strict) for i, path in enumerate(paths)]
    for i, other in enumerate(parts):
        _check_number(other, _NO, i)
        _check_number(other, _COUNT, count)
        if other.alignment != parts[0].alignment:
            # Some writers align every part alike but name the alignment in the first part only.
            raise FileError(
                f"{other.path}: aligned to {other.alignment} bytes, {parts[0].path.name} to "
                f"{parts[0].alignment}",
                "the parts do not say where their weights start: split the model again",
            )
    return parts


def _part_paths(part: Part, count: int) -> list[Path]:
    # llama.cpp's gguf-split numbers the parts from 0 in the metadata and from 1 in the names.
    no = part.metadata.integer(_NO, 0)
    match = _PART_NAME.fullmatch(part.path.name)
    named = match and (int(match["number"]), int(match["count"]))
    if not match or named != (no + 1, count) or not 0 <= no < count:
        raise FileError(
            f"{part.path}: key {_COUNT} at byte {part.metadata.offset(_COUNT)}: "
            f"is part {no + 1} of {count}, which its name does not say",
            f"the other parts are found by name: rename it to NAME-{no + 1:05}-of-{count:05}.gguf",
        )
    return [
        part.path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def _check_number(part: Part, key: str, wanted: int) -> None:
    if key not in part.metadata:
        raise FileError(f"{part.path}: key {key} is missing", "it belongs to no split model")
    found = part.metadata.integer(key, wanted)
    if found != wanted:
        at = part.metadata.offset(key)
        raise damaged(part.path, f"key {key}", at, f"is {found}, but its name says {wanted}")


def _merge_tensors(parts: list[Part]) -> dict[str, PackedTensor]:
    tensors: dict[str, PackedTensor] = {}
    for tensor in (tensor for part in parts for tensor in part.tensors):
        if tensor.name in tensors:
            found = f"is also in {tensors[tensor.name].path}"
            raise damaged(tensor.path, f"tensor {shown(tensor.name)}", tensor.offset, found)
        tensors[tensor.name] = tensor
    metadata = parts[0].metadata
    wanted = metadata.integer(_TENSORS, len(tensors))
    if wanted != len(tensors):
        found = f"is {wanted}, but the parts hold {len(tensors)} tensors"
        raise damaged(parts[0].path, f"key {_TENSORS}", metadata.offset(_TENSORS), found)
    return tensors
