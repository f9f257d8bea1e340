"""What a load refuses, in which words, before anything of the artifact runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi
from cli_runs import invoke, manifest

from xpuc.artifact import (
    FORMAT_VERSION,
    LIBRARY,
    MANIFEST,
    RUNTIME,
    TOKENIZER,
    WEIGHTS,
    file_facts,
    read_manifest,
)
from xpuc.errors import ArtifactError
from xpuc.runtime import checks
from xpuc.runtime.engine import load

HERE = Path("m.xpuc")
COPY = "copy the artifact again, or compile the model again: xpuc compile MODEL -o "


def target(**changes: Any) -> dict[str, Any]:
    return manifest().target | changes


def installed(folder: Path, version: str) -> Path:
    """A folder that says apache-tvm-ffi is installed in this version."""
    facts = folder / f"apache_tvm_ffi-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: {version}\n"
    )
    return folder


@pytest.mark.parametrize("version", ["0.1.14", "0.1.14.post0", "0.1.14.post9"])
def test_the_series_of_the_ffi_is_what_counts(version, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    checks.check_versions(HERE, manifest(tvm_ffi_version="0.1.14.post1"))


@pytest.mark.parametrize("version", ["0.1.13", "0.1.15", "0.2.14", "1.1.14"])
def test_another_series_of_the_ffi(version, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    with pytest.raises(ArtifactError) as caught:
        checks.check_versions(HERE, manifest(tvm_ffi_version="0.1.14.post1"))
    assert caught.value.message == (
        f"m.xpuc: compiled with apache-tvm-ffi 0.1.14.post1, installed is {version}"
    )
    assert caught.value.hint == (
        "pip install 'apache-tvm-ffi==0.1.14.post1', or compile the model again:"
        " xpuc compile MODEL -o m.xpuc"
    )


def test_no_ffi(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ArtifactError, match=r"needs apache-tvm-ffi 0.1.14.post1, none") as caught:
        checks.check_versions(HERE, manifest())
    assert caught.value.hint == "pip install 'apache-tvm-ffi==0.1.14.post1'"


@pytest.mark.parametrize(
    ("machine", "system", "triple"),
    [
        ("x86_64", "Linux", "aarch64-unknown-linux-gnu"),
        ("x86_64", "Linux", "x86_64-apple-darwin23.0.0"),
        ("arm64", "Darwin", "x86_64-unknown-linux-gnu"),
    ],
)
def test_another_machine(machine, system, triple, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.system", lambda: system)
    with pytest.raises(ArtifactError) as caught:
        checks.check_target(HERE, manifest(target=target(triple=triple, features=[])))
    assert caught.value.message == (
        f"m.xpuc: compiled for {triple}, this machine is {machine}-{system.lower()}"
    )
    assert caught.value.hint.endswith("xpuc compile MODEL -o m.xpuc")


@pytest.mark.parametrize(
    ("has", "missing"),
    [
        ({"avx2", "fma", "f16c"}, None),
        ({"avx2"}, "f16c, fma"),
        (set(), None),  # they cannot be told here
    ],
)
def test_cpu_features(has, missing, monkeypatch):
    monkeypatch.setattr(checks, "host_features", lambda: frozenset(has))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    facts = manifest(target=target(features=["f16c", "avx2", "fma", "64bit"]))
    if missing is None:
        checks.check_target(HERE, facts)
        return
    with pytest.raises(ArtifactError) as caught:
        checks.check_target(HERE, facts)
    assert caught.value.message == f"m.xpuc: needs CPU features this machine lacks: {missing}"
    assert "--cpu x86-64-v2" in caught.value.hint


def damage(name: str, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        change(data)
        (folder / name).write_bytes(data)

    return apply


def flip(name: str, at: int) -> Callable[[Path], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return damage(name, change)


def cut(name: str) -> Callable[[Path], None]:
    return damage(name, lambda data: data.pop())


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite(**changes: Any) -> Callable[[Path], None]:
    """Another manifest, whole in itself."""

    def apply(folder: Path) -> None:
        changed = dataclasses.replace(read_manifest(folder), **changes)
        (folder / MANIFEST).write_text(changed.to_json())

    return apply


def edit(old: str, new: str) -> Callable[[Path], None]:
    """What a person does to manifest.json."""

    def apply(folder: Path) -> None:
        text = (folder / MANIFEST).read_text()
        assert old in text
        (folder / MANIFEST).write_text(text.replace(old, new))

    return apply


def leave_out(key: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        facts = json.loads(read_manifest(folder).to_json())
        del facts[key]
        (folder / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")

    return apply


REFUSALS = {
    "no json": (damage(MANIFEST, lambda d: d.pop(0)), "manifest.json: not readable as JSON ("),
    "no text": (damage(MANIFEST, lambda d: d.insert(9, 0xFF)), "manifest.json: not readable as"),
    "other format": (
        rewrite(format_version=7),
        f"manifest.json: artifact format 7, this xpuc reads format {FORMAT_VERSION}",
    ),
    "manifest edited": (
        edit('"context": 64', '"context": 96'),
        "manifest.json: was changed after it was written",
    ),
    "key missing": (leave_out("kv"), "manifest.json: was changed after it was written"),
    "digest missing": (leave_out("digest"), "manifest.json: was changed after it was written"),
    "key of a later version": (
        rewrite(kv={"layers": [], "pages": 4}),
        "manifest.json: incomplete manifest (",
    ),
    "other ffi": (
        rewrite(tvm_ffi_version="0.1.15"),
        "compiled with apache-tvm-ffi 0.1.15, installed is 0.1.14",
    ),
    "other machine": (
        rewrite(target=target(triple="riscv64-unknown-linux-gnu")),
        "compiled for riscv64-unknown-linux-gnu, this machine is",
    ),
    "library missing": (remove(LIBRARY), "model.so: missing"),
    "runtime missing": (remove(RUNTIME), "lib/libtvm_runtime.so: missing"),
    "tokenizer missing": (remove(TOKENIZER), "tokenizer.json: missing"),
    "library cut": (cut(LIBRARY), "bytes, the manifest says"),
    "weights cut": (cut(WEIGHTS), "bytes, the manifest says"),
    "library damaged": (flip(LIBRARY, 5000), "model.so: damaged, its digest is"),
    "runtime damaged": (flip(RUNTIME, 5000), "libtvm_runtime.so: damaged, its digest is"),
    "tokenizer damaged": (flip(TOKENIZER, 100), "tokenizer.json: damaged, its digest is"),
    "template damaged": (flip("chat_template.jinja", 3), "chat_template.jinja: damaged"),
    "weights' header damaged": (flip(WEIGHTS, 40), "weights.safetensors: damaged, its digest"),
    "weights' length damaged": (flip(WEIGHTS, 0), "weights.safetensors: damaged, its digest"),
}


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(artifact, tmp_path / "copy.xpuc")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be opened as a library."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a library is opened")

    monkeypatch.setattr(tvm_ffi, "load_module", refuse)
    monkeypatch.setattr("ctypes.CDLL", refuse)


@pytest.mark.slow
@pytest.mark.usefixtures("closed")
def test_a_folder_without_a_manifest_is_not_advised_to_be_compiled_onto(copy):
    remove(MANIFEST)(copy)
    code, out, err = invoke("run", copy, "-p", "x")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {copy}: not an xpuc artifact (no manifest.json)",
        "hint: give the folder that xpuc compile wrote",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_two_lines_and_comes_before_the_library(name, copy):
    spoil, message = REFUSALS[name]
    spoil(copy)
    code, out, err = invoke("run", copy, "-p", "x")
    error, hint = err.splitlines()
    assert (code, out) == (2, "")
    assert error.startswith(f"error: {copy}")
    assert message in error
    assert hint.endswith(f"xpuc compile MODEL -o {copy}")


@pytest.mark.slow
@pytest.mark.usefixtures("closed")
def test_the_installed_ffi_is_compared_before_the_library(copy, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path / "path", "0.1.15"))
    with pytest.raises(ArtifactError, match=r"installed is 0\.1\.15"):
        load(copy)


@pytest.mark.slow
def test_only_verify_finds_damage_in_the_weights(copy):
    facts = read_manifest(copy)
    total = sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    assert checks.verify(copy, facts) == total
    flip(WEIGHTS, -100)(copy)
    checks.check_files(copy, facts)
    code, out, err = invoke("inspect", copy, "--verify")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith(f"error: {copy / WEIGHTS}: damaged, its digest is")
    assert err.splitlines()[1] == f"hint: {COPY}{copy}"


@pytest.mark.slow
def test_only_verify_finds_damage_in_a_report(copy):
    flip("reports/compile.json", 0)(copy)
    checks.check_files(copy, read_manifest(copy))
    with pytest.raises(ArtifactError, match=r"compile\.json: damaged"):
        checks.verify(copy, read_manifest(copy))


@pytest.mark.slow
def test_the_manifest_knows_every_file(artifact):
    assert read_manifest(artifact).files == file_facts(artifact)


@pytest.mark.slow
def test_a_library_that_cannot_be_opened(copy):
    """Whole as the manifest says, but none: of a machine whose C library is newer, say."""
    (copy / LIBRARY).write_bytes(b"no library at all")
    rewrite(files=file_facts(copy))(copy)
    code, _, err = invoke("run", copy, "-p", "x")
    error, hint = err.splitlines()
    assert code == 2
    assert error.startswith(f"error: {copy / LIBRARY}: cannot be loaded (")
    assert hint == f"hint: on this machine, compile the model again: xpuc compile MODEL -o {copy}"
