"""The manifest: read as it was written, refused by name when it is not one; digests of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import manifest, write_manifest

from xpuc.artifact import MANIFEST, WEIGHTS, file_facts, header_digest, read_manifest
from xpuc.errors import ArtifactError


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_manifest(write_manifest(tmp_path / "a")) == manifest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "artifact format None"),
        ('{"format_version": 99}', "artifact format 99"),
        (manifest().to_json().replace("Tiny", "Tidy"), "was changed after it was written"),
        (manifest(kv={"layers": []}).to_json(), "incomplete manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_manifest(tmp_path)
    assert "xpuc compile MODEL" in caught.value.hint


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"not an xpuc artifact \(no manifest.json\)"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 1 << 40, (1 << 64) - 1])
def test_the_header_digest_stands_a_damaged_length(length: int, tmp_path: Path) -> None:
    good, damaged = tmp_path / "good", tmp_path / "damaged"
    for path, n in ((good, 4), (damaged, length)):
        path.write_bytes(n.to_bytes(8, "little") + b"{  }weights")
    assert header_digest(good) != header_digest(damaged)


def test_facts_of_files_leave_out_the_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path / "a")
    (tmp_path / "a" / "lib").mkdir()
    (tmp_path / "a" / "lib" / "x.so").write_bytes(b"123")
    (tmp_path / "a" / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"{  }weights")
    facts = file_facts(tmp_path / "a")
    assert [(name, each["bytes"], len(each)) for name, each in facts.items()] == [
        ("lib/x.so", 3, 2),
        (WEIGHTS, 19, 3),
    ]
