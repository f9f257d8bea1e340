"""A bundle: candidates compiled for a GPU, in one file, for a box that has no compiler.

bundle.zip
  manifest.json     what there is to measure, for which GPUs, made with which versions
  lib/              the TVM runtime libraries the kernels run on, and their licence
  roofs.so          the kernels that measure what the card allows
  N.so              the candidates of a task, each under names of its own
  blocks/FORMAT.npz the blocks that weights are put together from: as GGUF has them, and as planes

Neither weights nor results are in it: both follow from a seed.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xpuc.artifact import digest
from xpuc.errors import ArtifactError, FileError
from xpuc.tuning.candidates import Call, Candidate, Program, Tensor
from xpuc.tuning.inputs import Layout, Matrix, draw
from xpuc.tuning.results import Cost
from xpuc.tuning.roofs import Loop
from xpuc.tuning.workbench import Job

FORMAT_VERSION = 2
MANIFEST, ROOFS, BLOCKS = "manifest.json", "roofs.so", "blocks"


@dataclass(frozen=True)
class PlainWeight:
    """A packed matrix of a site; `planes` are the sizes of its planes, in elements."""

    format: str
    rows: int
    columns: int
    planes: tuple[int, ...]


@dataclass(frozen=True)
class PlainSite:
    """A site without its variables: what a bundle knows of schedules.Site."""

    as_json: Mapping[str, Any]
    weights: tuple[PlainWeight, ...]

    def facts(self) -> dict[str, Any]:
        """Those of schedules.Site."""
        return dict(self.as_json)

    @property
    def op(self) -> str:
        return str(self.as_json["op"])

    @property
    def attrs(self) -> Mapping[str, Any]:
        attrs: Mapping[str, Any] = self.as_json["attrs"]
        return attrs

    @property
    def n(self) -> int | None:
        rows: int | None = self.as_json["rows"]
        return rows

    @property
    def block_tokens(self) -> int:
        return int(self.as_json["block_tokens"])

    @property
    def kv_dtype(self) -> str:
        return str(self.as_json["kv_dtype"])


@dataclass(frozen=True)
class BundledTask:
    """A task: the candidates of `library`, first the one in use today, then those to try, in order.

    `facts` are those of its site, `plane_sizes` those of each weight; `rows` it is measured with,
    at `costs`; `tolerance` is that of its schedule.
    """

    name: str
    schedule: str
    facts: Mapping[str, Any]
    plane_sizes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    costs: tuple[Cost, ...]
    tile_rows: int
    tolerance: float
    library: str
    candidates: tuple[Candidate, ...]

    @property
    def site(self) -> PlainSite:
        weights = zip(self.facts["weights"], self.plane_sizes, strict=True)
        return PlainSite(self.facts, tuple(PlainWeight(f, r, k, p) for (f, r, k), p in weights))


@dataclass(frozen=True)
class BundleManifest:
    """What a bundle says of itself; `arch` is the one its code is for."""

    arch: str
    tvm: str
    tvm_ffi: str
    xpuc: str
    segment_tokens: int
    loops: tuple[Loop, ...]
    tasks: tuple[BundledTask, ...]


def write(path: Path, manifest: BundleManifest, folder: Path) -> None:
    """The files of `folder` and the manifest as one; it appears whole or not at all."""
    text = json.dumps({"format": FORMAT_VERSION, **dataclasses.asdict(manifest)})
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.part")
    try:
        with zipfile.ZipFile(staged, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(MANIFEST, text)
            for each in sorted(p for p in folder.rglob("*") if p.is_file()):
                file.write(each, each.relative_to(folder))
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def unpack(path: Path, folder: Path) -> tuple[BundleManifest, str]:
    """A bundle's manifest and its digest, its files in `folder`; FileError if it is damaged."""
    again = "export it again: xpuc tune MODEL --target cuda --export BUNDLE"
    if not path.is_file():
        raise FileError(f"{path}: not found", "give the path of a bundle of xpuc tune --export")
    try:
        with zipfile.ZipFile(path) as file:
            text = file.read(MANIFEST)
            version = json.loads(text)["format"]
            if version != FORMAT_VERSION:
                raise ArtifactError(
                    f"{path}: a bundle of format {version}, this xpuc reads {FORMAT_VERSION}", again
                )
            file.extractall(folder)
        manifest = read(folder)
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path}: damaged, or no bundle ({error})", again) from None
    return manifest, digest(path)


def read(folder: Path) -> BundleManifest:
    """The manifest of a bundle unpacked there."""
    return _manifest(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def _manifest(raw: dict[str, Any]) -> BundleManifest:
    del raw["format"]
    loops = tuple(Loop(**loop | {"result": tuple(loop["result"])}) for loop in raw["loops"])
    tasks = tuple(_task(task) for task in raw["tasks"])
    return BundleManifest(**raw | {"loops": loops, "tasks": tasks})


def _task(raw: dict[str, Any]) -> BundledTask:
    return BundledTask(
        **raw
        | {
            "plane_sizes": tuple(tuple(sizes) for sizes in raw["plane_sizes"]),
            "rows": tuple(raw["rows"]),
            "costs": tuple(Cost(**cost) for cost in raw["costs"]),
            "candidates": tuple(_candidate(each) for each in raw["candidates"]),
        }
    )


def _candidate(raw: dict[str, Any]) -> Candidate:
    program = raw["program"]
    made = Program(
        tuple(Call(c["function"], tuple(c["args"])) for c in program["calls"]),
        tuple(Tensor(**t | {"shape": tuple(t["shape"])}) for t in program["tensors"]),
        tuple(program["results"]),
    )
    return Candidate(raw["knobs"], raw["kernel"], made, is_default=raw["is_default"])


class Blocks:
    """What weights are put together from, by format, in a bundle's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / BLOCKS
        self._tables: dict[str, list[np.ndarray]] = {}

    def save(self, format: str, raw: np.ndarray, planes: Sequence[np.ndarray]) -> None:
        """Blocks uint8 (count, block bytes), and their planes: the same number of elements each."""
        self._folder.mkdir(parents=True, exist_ok=True)
        parts = [plane[: plane.size // len(raw) * len(raw)] for plane in planes]
        np.savez(self._folder / f"{format}.npz", raw, *(p.reshape(len(raw), -1) for p in parts))

    def raw(self, format: str) -> np.ndarray:
        """As GGUF has them."""
        return self._table(format)[0]

    def planes(self, matrix: Matrix, sizes: Sequence[int]) -> list[np.ndarray]:
        """The planes of a matrix: its rows lie one after the other, and so do their blocks."""
        chosen = matrix.chosen.reshape(-1)
        made = []
        for table, size in zip(self._table(matrix.format)[1:], sizes, strict=True):
            plane = np.zeros(size, table.dtype)
            plane[: chosen.size * table.shape[1]] = table[chosen].reshape(-1)
            made.append(plane)
        return made

    def _table(self, format: str) -> list[np.ndarray]:
        if format not in self._tables:
            with np.load(self._folder / f"{format}.npz", allow_pickle=False) as file:
                self._tables[format] = [file[name] for name in file.files]
        return self._tables[format]


def job_of(task: BundledTask, blocks: Blocks, segment_tokens: int) -> Job:
    """A task as it is put on a workbench."""
    site = task.site
    sizes = {(w.format, w.rows): w.planes for w in site.weights}  # all have the same columns

    def pack(matrix: Matrix, raw: np.ndarray) -> list[np.ndarray]:
        return blocks.planes(matrix, sizes[matrix.format, len(matrix.chosen)])

    layout = Layout(blocks.raw, pack, task.tile_rows, segment_tokens)
    cases = tuple(draw(site, layout, rows) for rows in task.rows)
    return Job(task.name, site, cases, task.costs, task.tolerance)
