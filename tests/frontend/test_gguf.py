"""What open_gguf gives for good files, compared with what the gguf package wrote and reads."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import gguf_files as files
import numpy as np
import pytest
import xxhash
from gguf_reader import Reader

from xpuc.errors import UnsupportedError
from xpuc.frontend.ggml_types import SUPPORTED, TYPES
from xpuc.frontend.gguf import GgufFile, open_gguf
from xpuc.ir.formats import formats


def save(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def assert_reads_like_the_gguf_package(path: Path) -> None:
    ours, reader = open_gguf(path), Reader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        kinds = [kind.name.lower() for kind in field.types]
        wanted = kinds[0] if len(kinds) == 1 else f"{kinds[1]}[]"
        assert ours.metadata.kind(key) == wanted, key
        np.testing.assert_array_equal(np.asarray(ours.metadata[key]), field.contents(), key)
    assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = ours.tensors[tensor.name]
        assert found.format == tensor.tensor_type.name
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.offset == tensor.data_offset
        np.testing.assert_array_equal(found.data, tensor.data.reshape(-1).view(np.uint8))


def test_every_kind_of_value_and_type_of_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    files.write_every_kind(path)
    assert_reads_like_the_gguf_package(path)


def test_values_have_the_python_types_of_their_kinds(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    files.write_every_kind(path)
    metadata = open_gguf(path).metadata
    for kind, number in files.NUMBERS.items():
        assert metadata[f"one.{kind}"] == number
        assert type(metadata[f"one.{kind}"]) is type(number)
        many = metadata[f"many.{kind}"]
        assert isinstance(many, np.ndarray)
        assert many.dtype == np.dtype(kind)
        assert not many.flags.writeable
    assert metadata["one.string"] == files.STRING
    assert metadata["many.string"] == files.STRINGS


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_reads_like_the_gguf_package(smollm2_gguf: Path) -> None:
    assert_reads_like_the_gguf_package(smollm2_gguf)


@pytest.mark.slow
@pytest.mark.model
def test_gemma3_reads_like_the_gguf_package(gemma3_gguf: Path) -> None:
    assert_reads_like_the_gguf_package(gemma3_gguf)


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    files.write_every_kind(path)
    content = path.read_bytes()
    model = open_gguf(path)
    for tensor in model.tensors.values():
        assert not tensor.data.flags.writeable
        assert not tensor.data.flags.owndata
        end = tensor.offset + tensor.data.nbytes
        assert tensor.data.tobytes() == content[tensor.offset : end]
        assert tensor.path == path
    assert model.paths == (path,)
    assert model.n_bytes == len(content)
    assert (model.version, model.alignment) == (3, 32)


def test_data_outlive_the_opened_file_and_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    files.write_every_kind(path)
    data = open_gguf(path).tensors["q4_k.weight"].data
    before = data.tobytes()
    path.unlink()
    assert data.tobytes() == before


def test_version_2(tmp_path: Path) -> None:
    content = files.gguf_bytes([files.entry("k", 4, bytes(4))], version=2)
    assert open_gguf(save(tmp_path, content)).version == 2


def test_a_file_of_metadata_alone(tmp_path: Path) -> None:
    content = files.gguf_bytes([files.entry("k", 8, files.text("v"))], data=None)
    model = open_gguf(save(tmp_path, content))
    assert dict(model.metadata) == {"k": "v"}
    assert model.tensors == {}


def test_a_tensor_without_dimensions_holds_one_weight(tmp_path: Path) -> None:
    tensor = open_gguf(save(tmp_path, files.gguf_bytes([], [files.tensor("t", [], 0)]))).tensors[
        "t"
    ]
    assert (tensor.shape, tensor.data.nbytes) == ((), 4)


def test_space_between_tensors_is_allowed(tmp_path: Path) -> None:
    tensors = [files.tensor("a", [4], 0), files.tensor("b", [4], 0, offset=96)]
    model = open_gguf(save(tmp_path, files.gguf_bytes([], tensors)))
    assert model.tensors["b"].offset - model.tensors["a"].offset == 96


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full(5, i, np.float32))
    files.finish(writer)
    model = open_gguf(path)
    assert model.alignment == alignment
    for i in range(3):
        assert model.tensors[f"t{i}"].offset % alignment == 0
        assert (model.tensors[f"t{i}"].data.view(np.float32) == i).all()


def test_opening_copies_no_string(tmp_path: Path) -> None:
    n_tokens = 20_000
    strings = b"".join(files.text(f"token {i}") for i in range(n_tokens))
    tokens = files.entry("tokens", 9, files.array(8, n_tokens, strings))
    template = files.entry("template", 8, files.text("x" * 200_000))
    path = save(tmp_path, files.gguf_bytes([tokens, template]))

    def peak_of_opening() -> tuple[GgufFile, int]:
        tracemalloc.start()
        try:
            return open_gguf(path), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_of_opening()  # imports and caches
    model, peak = peak_of_opening()
    assert peak < 30_000  # a list of the strings alone would be 160000 bytes
    assert model.metadata.n_values("tokens") == n_tokens
    assert "tokens" in model.metadata
    assert model.metadata._decoded == {}
    found = model.metadata["tokens"]
    assert isinstance(found, list)
    assert found == [f"token {i}" for i in range(n_tokens)]
    assert model.metadata["tokens"] is found


def test_metadata_is_a_mapping_that_knows_its_kinds(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    files.write_every_kind(path)
    metadata = open_gguf(path).metadata
    assert metadata.kind("many.string") == "string[]"
    assert metadata.kind("one.float64") == "float64"
    assert metadata.n_values("many.string") == len(files.STRINGS)
    assert metadata.n_values("one.uint8") == 1
    assert len(metadata) == len(list(metadata))
    assert metadata.get("no such key", 7) == 7
    with pytest.raises(KeyError):
        metadata["no such key"]
    at = metadata.offset("one.uint16")
    assert path.read_bytes()[at : at + 2] == b"\xff\xff"


def test_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    content = files.gguf_bytes(data=bytes(40 << 20))
    model = open_gguf(save(tmp_path, content))
    chunks: list[int] = []
    assert model.digest(chunks.append) == xxhash.xxh3_128_hexdigest(content)
    assert sum(chunks) == model.n_bytes == len(content)
    assert len(chunks) > 1
    assert model.digest() == xxhash.xxh3_128_hexdigest(content)


def test_table_of_types_agrees_with_the_gguf_package() -> None:
    for tensor_type, (n, n_bytes) in gguf.GGML_QUANT_SIZES.items():
        known = TYPES[tensor_type.value]
        found = (known.name, known.block_weights, known.block_bytes)
        assert found == (tensor_type.name, n, n_bytes)
        assert not known.replacement


def test_table_of_types_agrees_with_the_formats_xpuc_decodes() -> None:
    found = {t.name: (t.block_weights, t.block_bytes) for t in TYPES.values() if t.is_supported}
    assert found == {name: (f.n, f.nbytes) for name, f in formats().items()}
    assert set(SUPPORTED) == set(found)


@pytest.mark.parametrize("type_id", sorted(TYPES))
def test_only_decodable_types_are_opened_strictly(tmp_path: Path, type_id: int) -> None:
    known = TYPES[type_id]
    columns = known.block_weights * 2
    content = files.gguf_bytes([], [files.tensor("t", [columns, 3], type_id)], data=bytes(2048))
    path = save(tmp_path, content)
    listed = open_gguf(path, strict=False).tensors["t"]
    assert (listed.format, listed.shape) == (known.name, (3, columns))
    assert listed.data.nbytes == 6 * known.block_bytes
    if known.is_supported:
        assert open_gguf(path).tensors["t"].format == known.name
        return
    with pytest.raises(UnsupportedError) as caught:
        open_gguf(path)
    if known.replacement:
        assert caught.value.message == f"{path}: tensor t is {known.name}, which ggml has removed"
        assert f"quantise the model to {known.replacement} instead" in caught.value.hint
    else:
        assert caught.value.message == f"{path}: tensor t is {known.name}, which xpuc cannot decode"
    assert caught.value.hint.endswith(f"supported: {' '.join(SUPPORTED)}")


def test_the_types_ggml_has_are_all_known() -> None:
    assert sorted(TYPES) == list(range(43))
    removed = {t.id for t in TYPES.values() if t.replacement}
    assert removed == {4, 5, 31, 32, 33, 36, 37, 38}
    assert {TYPES[i].replacement for i in removed} <= set(SUPPORTED)
