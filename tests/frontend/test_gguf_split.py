"""Split GGUF files: any part opens all of them, and what does not fit together is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_files as files
import pytest
import xxhash

from xpuc.errors import FileError
from xpuc.frontend.gguf import open_gguf


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """t0 and t1, t2 and t3, t4."""
    files.write_split(tmp_path / "m.gguf")
    return [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


def part_bytes(no: int, count: int, tensors: list[bytes], total: int | None = None) -> bytes:
    entries = [
        files.entry("split.no", 2, struct.pack("<H", no)),
        files.entry("split.count", 2, struct.pack("<H", count)),
    ]
    if total is not None:
        entries.append(files.entry("split.tensors.count", 5, struct.pack("<i", total)))
    return files.gguf_bytes(entries, tensors)


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_all(parts: list[Path], opened: int) -> None:
    model = open_gguf(parts[opened])
    assert model.paths == tuple(parts)
    assert model.metadata["general.architecture"] == "llama"  # only the first part has it
    assert model.metadata["split.no"] == 0
    assert list(model.tensors) == [f"t{i}" for i in range(5)]
    for i in range(5):
        tensor = model.tensors[f"t{i}"]
        assert (tensor.data.view("<f4") == i).all()
        assert tensor.path == parts[i // 2]
    content = [part.read_bytes() for part in parts]
    assert model.n_bytes == sum(map(len, content))
    assert model.digest() == xxhash.xxh3_128_hexdigest(b"".join(content))


@pytest.mark.parametrize("lost", [0, 2])
def test_a_missing_part_is_named(parts: list[Path], lost: int) -> None:
    parts[lost].unlink()
    with pytest.raises(FileError) as caught:
        open_gguf(parts[1])
    wanted = f"{parts[1]}: is one of 3 parts; missing: {parts[lost].name}"
    assert caught.value.message == wanted
    assert str(parts[1].parent) in caught.value.hint


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-00001-of-00003.gguf", "m-00002-of-00004.gguf", "m-2-of-3.gguf"]
)
def test_a_part_under_another_name_is_refused(parts: list[Path], name: str) -> None:
    renamed = parts[1].with_name(name)
    parts[1].rename(renamed)
    with pytest.raises(FileError, match=r"key split.count at byte \d+: is part 2 of 3") as caught:
        open_gguf(renamed)
    assert "NAME-00002-of-00003.gguf" in caught.value.hint


def test_parts_of_different_models_are_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(part_bytes(1, 3, []))
    with pytest.raises(
        FileError, match=r"00003-of-00003.gguf: key split.no at byte \d+: is 1, but .* 2"
    ):
        open_gguf(parts[0])
    parts[2].write_bytes(part_bytes(2, 4, []))
    with pytest.raises(FileError, match=r"00003-of-00003.gguf: key split.count at byte \d+: is 4"):
        open_gguf(parts[0])
    parts[2].write_bytes(files.gguf_bytes())
    with pytest.raises(FileError, match=r"00003-of-00003.gguf: key split.no is missing"):
        open_gguf(parts[0])


def test_a_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00005-of-00003.gguf"
    path.write_bytes(part_bytes(4, 3, []))
    with pytest.raises(FileError, match=r"key split.count at byte \d+: is part 5 of 3"):
        open_gguf(path)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for no, path in enumerate(paths):
        path.write_bytes(part_bytes(no, 2, [files.tensor("t", [4], 0)]))
    with pytest.raises(FileError) as caught:
        open_gguf(paths[0])
    assert caught.value.message == f"{paths[1]}: tensor t at byte 128: is also in {paths[0]}"


def test_a_wrong_number_of_tensors_is_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(part_bytes(2, 3, []))
    with pytest.raises(
        FileError, match=r"00001-of-00003.gguf: key split.tensors.count at byte \d+: is 5"
    ):
        open_gguf(parts[0])


def test_parts_aligned_differently_are_refused(tmp_path: Path) -> None:
    # gguf's writer aligns all parts to 64 bytes but says so in the first part only.
    files.write_split(tmp_path / "m.gguf", alignment=64)
    with pytest.raises(FileError, match=r"00002-of-00003.gguf: aligned to 32 bytes"):
        open_gguf(tmp_path / "m-00001-of-00003.gguf")


def test_one_part_is_not_a_split_model(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(part_bytes(0, 1, [files.tensor("t", [4], 0)], total=1))
    assert list(open_gguf(path).tensors) == ["t"]
