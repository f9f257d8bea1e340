"""The manifest: read as it was written, refused by name when it is not one; digests of files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from cli_runs import manifest, write_manifest

from xpuc.artifact import MANIFEST, WEIGHTS, KvLayout, file_facts, header_digest, read_manifest
from xpuc.errors import ArtifactError


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_manifest(write_manifest(tmp_path / "a")) == manifest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as JSON"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
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


def text_of(folder: Path) -> str:
    return (folder / MANIFEST).read_text(encoding="utf-8")


def test_the_manifest_ends_in_the_digest_of_what_stands_before_it(tmp_path: Path) -> None:
    written = text_of(write_manifest(tmp_path / "a", name="Zwölf 零"))
    facts = json.loads(written)
    *_, last = facts
    assert last == "digest"
    digest = facts.pop("digest")
    before = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    assert digest == xxhash.xxh3_128_hexdigest(before.encode())


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + " ",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: json.dumps(json.loads(text)),  # by another program
        lambda text: re.sub(r',\n "digest": .*', "", text),
        lambda text: re.sub(r'("digest": ").', r"\g<1>x", text),
        lambda text: re.sub(r'"digest": "\w*"', '"digest": null', text),
        lambda text: re.sub(r'("digest": .*)\n', r'\1,\n "context": 9\n', text),
        lambda text: text.replace(' "context": 96', ' "context": 97'),
        lambda text: text.replace(" ", "  ", 1),
    ],
)
def test_a_manifest_that_was_touched_is_refused(edit: Callable[[str], str], tmp_path: Path) -> None:
    folder = write_manifest(tmp_path / "a b")
    touched = edit(text_of(folder))
    assert touched != text_of(folder)
    (folder / MANIFEST).write_bytes(touched.encode())
    with pytest.raises(ArtifactError, match="was changed after it was written") as caught:
        read_manifest(folder)
    assert caught.value.hint == (
        f"copy the artifact again, or compile the model again: xpuc compile MODEL -o '{folder}'"
    )


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


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("float32", 4)])
def test_bytes_of_a_token_in_the_pool(dtype: str, size: int) -> None:
    layout = KvLayout(dtype, 16, 128, 8, ((2, 16, 0), (3, 8, 40)))
    assert layout.windows == (0, 40)
    assert layout.block_bytes(0) == 16 * 2 * 2 * 16 * size
    assert layout.block_bytes(40) == 16 * 2 * 3 * 8 * size


def test_scales_are_bytes_of_the_pool_too() -> None:
    layout = KvLayout("q8_0", 16, 128, 8, ((2, 64, 0), (3, 32, 40)))
    assert [layout.token_bytes(layer) for layer in (0, 1)] == [2 * 2 * 2 * 34, 2 * 3 * 34]
    assert [layout.block_bytes(window) for window in (0, 40)] == [
        16 * 2 * 2 * 2 * 34,
        16 * 2 * 3 * 34,
    ]
