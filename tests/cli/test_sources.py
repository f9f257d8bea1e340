"""A checkpoint is compiled into the cache once, and again when anything that matters differs."""

import fcntl
import threading
from pathlib import Path

import pytest
from cli_runs import write_manifest
from gguf_files import gguf_bytes
from tiny_models import write_tiny

from xpuc.artifact import Synthetic
from xpuc.cli import sources
from xpuc.errors import FileError


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The compilations asked for: (checkpoint, artifact, ctx)."""
    monkeypatch.setenv("XPUC_CACHE", str(tmp_path / "cache"))
    calls = []

    def compile_(path, destination, ctx):
        calls.append((path, destination, ctx))
        destination.mkdir()

    monkeypatch.setattr(sources, "_compile", compile_)
    return calls


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("models") / "tiny.gguf")


def test_an_artifact_is_taken_as_it_is(tmp_path, compiled, capsys):
    path = write_manifest(tmp_path / "m.xpuc")
    assert sources.artifact(path) == path
    assert not compiled
    assert capsys.readouterr().err == ""


def test_synthetic_weights_are_said_to_be_so(tmp_path, capsys):
    path = write_manifest(tmp_path / "m.xpuc", synthetic=Synthetic(3, ((0.0, 1.0),)))
    assert sources.artifact(path) == path
    said = "has synthetic weights (seed 3): what it answers means nothing\n"
    assert capsys.readouterr().err.endswith(said)


def test_the_first_call_compiles_and_the_next_finds_it(model, compiled, tmp_path):
    first, again = sources.artifact(model), sources.artifact(model)
    assert first == again
    assert first.parent == tmp_path / "cache"
    assert first.name.startswith("tiny-")
    assert compiled == [(model, first, 0)]


def test_a_copy_is_the_same_model_and_another_content_is_not(model, compiled, tmp_path):
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(model.read_bytes())
    assert sources.artifact(model) == sources.artifact(copy)
    write_tiny("llama", copy, seed=1)
    assert sources.artifact(copy) != sources.artifact(model)


def test_only_a_context_beyond_the_usual_is_compiled_for(model, compiled):
    usual = sources.artifact(model)
    assert sources.artifact(model, 100) == usual
    assert sources.artifact(model, 512) == usual  # what the checkpoint was trained for
    assert sources.artifact(model, 600) != usual
    assert [ctx for _, _, ctx in compiled] == [0, 600]


@pytest.mark.parametrize(
    ("where", "new"),
    [
        ("xpuc.__version__", "9.9"),
        ("xpuc.artifact.FORMAT_VERSION", 99),
        ("platform.machine", lambda: "riscv64"),
        ("xpuc.runtime.checks.host_features", lambda: frozenset({"avx512f"})),
        ("importlib.metadata.version", lambda name: "0.28"),
    ],
)
def test_another_version_or_machine_is_compiled_for_anew(model, compiled, monkeypatch, where, new):
    usual = sources.artifact(model)
    monkeypatch.setattr(where, new)
    assert sources.artifact(model) != usual
    assert len(compiled) == 2


def test_what_a_killed_compilation_has_left_is_cleared_away(model, compiled, tmp_path):
    kept = sources.artifact(model)
    left = kept.with_name(f".{kept.name}.abc") / "artifact"
    left.mkdir(parents=True)
    assert sources.artifact(model) == kept
    assert not left.parent.exists()


def test_whether_a_file_can_be_written_makes_none(tmp_path):
    sources.require_writable(tmp_path / "new" / "folder" / "file")
    (tmp_path / "there").write_text("kept")
    sources.require_writable(tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "kept"
    for path in (tmp_path, tmp_path / "there" / "x" / "y"):
        with pytest.raises(FileError, match="cannot be written"):
            sources.require_writable(path)


def test_in_a_folder_that_is_gone_no_file_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    try:
        with pytest.raises(FileError, match="file: cannot be written"):
            sources.require_writable(Path("file"))
    finally:
        tmp_path.mkdir()


def test_a_compilation_that_fails_leaves_nothing_behind(model, compiled, monkeypatch):
    def fail(path, destination, ctx):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(sources, "_compile", fail)
        with pytest.raises(RuntimeError):
            sources.artifact(model)
    sources.artifact(model)
    assert len(compiled) == 1


def test_two_at_once_compile_once(model, compiled, capsys):
    path = sources.artifact(model)
    compiled.clear()
    path.rmdir()
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=sources.artifact, args=(model,))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it did not wait"
        path.mkdir()
    second.join()
    assert not compiled
    assert "waiting for another xpuc" in capsys.readouterr().err


def test_a_checkpoint_without_its_keys_still_has_a_name(compiled, tmp_path):
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(gguf_bytes())
    assert sources.artifact(bare).name.startswith("bare-")


def test_the_cache_is_under_home_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("XPUC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.cache_dir() == tmp_path / ".cache" / "xpuc"
    monkeypatch.setenv("XPUC_CACHE", "~/models")
    assert sources.cache_dir() == tmp_path / "models"


class _Terminal:
    def isatty(self):
        return True


def test_a_terminal_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("sys.stdin", _Terminal())
    with pytest.raises(sources.RequestError, match="there is no prompt"):
        sources.text(None, None)
