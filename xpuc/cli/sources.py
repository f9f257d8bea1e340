"""What a command is given: text, an artifact, or a checkpoint to compile into the cache."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from xpuc.errors import FileError, RequestError

# What compile takes where --ctx (tokens, at most) and --max-batch are not given.
DEFAULT_CONTEXT, DEFAULT_BATCH = 8192, 8


def is_artifact(path: Path) -> bool:
    """Whether the path is meant as an artifact: a directory, or one's name."""
    return path.is_dir() or path.suffix == ".xpuc"


def require(path: Path, what: str = "a MODEL or ARTIFACT") -> Path:
    """The path if something is there; `what` it is to be."""
    if not path.exists():
        raise FileError(f"{path}: not found", f"give the path of {what}")
    return path


def require_writable(path: Path) -> None:
    """FileError if no file can be written there, or its folder be made: asked before the work
    whose result goes there."""
    try:
        there = next(each for each in path.absolute().parents if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written ({error.strerror})",
            "name a file in a folder that can be written",
        ) from None


def artifact(path: Path, ctx: int | None = None) -> Path:
    """The artifact at `path`, or the one compiled from the checkpoint there for `ctx` tokens.

    One with synthetic weights is said to be so.
    """
    require(path)
    if not is_artifact(path):
        return _cached(path, ctx)
    from xpuc.artifact import read_manifest

    synthetic = read_manifest(path).synthetic
    if synthetic is not None:
        click.echo(f"note: {path} has {synthetic}: what it answers means nothing", err=True)
    return path


def cache_dir() -> Path:
    """Where compiled checkpoints are kept."""
    named = os.environ.get("XPUC_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "xpuc"


def _cached(path: Path, ctx: int | None) -> Path:
    """One artifact a content, context, machine and set of versions; the first call compiles it."""
    from xpuc.frontend.gguf import open_gguf

    model = open_gguf(path)
    trained = model.metadata.integer(
        f"{model.metadata.get('general.architecture')}.context_length", 0
    )
    wanted = ctx if ctx and ctx > min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT) else 0
    destination = cache_dir() / f"{path.stem}-{_key(model.digest(), wanted)}.xpuc"
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _lock(destination.with_suffix(".lock"), path):
        for each in destination.parent.iterdir():
            if each.name.startswith(f".{destination.name}."):  # of a compilation that was killed
                shutil.rmtree(each, ignore_errors=True)
        if not destination.exists():
            _compile(path, destination, wanted)
    return destination


def _key(checkpoint: str, ctx: int) -> str:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import xxhash

    import xpuc
    from xpuc import tune_db
    from xpuc.artifact import FORMAT_VERSION, digest
    from xpuc.runtime.checks import host_features

    tuned = [folder / "llvm.jsonl" for folder in (tune_db.SHIPPED, tune_db.user_folder())]

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"

    facts = (
        checkpoint, ctx, FORMAT_VERSION, xpuc.__version__,
        installed("apache-tvm"), installed("apache-tvm-ffi"),
        platform.machine(), *sorted(host_features()),
        *(digest(records) for records in tuned if records.is_file()),
    )  # fmt: skip
    return xxhash.xxh3_64_hexdigest(repr(facts).encode())


def _compile(path: Path, destination: Path, ctx: int) -> None:
    from xpuc.cli.progress import phases

    click.echo(f"compiling {path} into {destination} (once; later runs use it)", err=True)
    with phases() as progress:
        progress("compiler", 0, 0)
        from xpuc.codegen.compile import Options, compile_model

        compile_model(path, out=destination, options=Options(ctx=ctx), progress=progress)


@contextmanager
def _lock(path: Path, model: Path) -> Iterator[None]:
    """One process at a time; another one that wants the same waits and says so."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            click.echo(f"waiting for another xpuc that compiles {model}", err=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def text(prompt: str | None, file: Path | None) -> str:
    """The text of -p, else of the file of -f (`-`: stdin), else of a stdin that is piped."""
    if prompt is not None and file is not None:
        raise RequestError("both -p and -f are given", "give the text one way")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        return decoded(require(file, "a text file").read_bytes(), str(file))
    if sys.stdin is None or (sys.stdin.isatty() and file is None):
        raise RequestError("there is no prompt", "give it with -p TEXT or -f FILE, or pipe it in")
    return decoded(sys.stdin.buffer.read(), "stdin")


def decoded(raw: bytes, name: str) -> str:
    """UTF-8 text; what is none is a FileError that names the byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FileError(
            f"{name}: byte {error.start} is not UTF-8", "convert the text to UTF-8 (iconv -t UTF-8)"
        ) from None
