"""`xpuc inspect`: all of a checkpoint and of an artifact, for people and as JSON."""

import dataclasses

import pytest
from cli_runs import invoke, manifest
from gguf_files import entry, gguf_bytes, tensor, text, write_every_kind
from tiny_models import write_tiny

from xpuc.artifact import LIBRARY, MANIFEST, WEIGHTS, file_facts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny("gemma3", path, weights={"*": "Q4_0", "token_embd": "Q8_0"})


@pytest.fixture
def artifact(tmp_path):
    """Files and a manifest that agree."""
    folder = tmp_path / "m.xpuc"
    folder.mkdir()
    header = b'{"__metadata__": {}}'
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    (folder / LIBRARY).write_bytes(b"library")
    made = dataclasses.replace(manifest(), files=file_facts(folder))
    (folder / MANIFEST).write_text(made.to_json())
    return folder


def test_metadata_tensors_types_and_sizes(checkpoint):
    found = invoke("inspect", checkpoint, "--json").json
    assert found["format"] == "GGUF v3"
    assert found["metadata"]["general.architecture"] == {"type": "string", "value": "gemma3"}
    assert found["metadata"]["tokenizer.ggml.tokens"].keys() == {"type", "count"}
    assert found["bytes"] == checkpoint.stat().st_size
    named = {each["name"]: each for each in found["tensors"]}
    table = named["token_embd.weight"]
    assert (table["type"], table["supported"]) == ("Q8_0", True)
    assert table["bytes"] == table["shape"][0] * table["shape"][1] // 32 * 34
    assert sum(row["tensors"] for row in found["types"].values()) == len(named)
    assert sum(row["bytes"] for row in found["types"].values()) == found["memory"]["weights"]
    # 7 layers of 1 K/V head of 32, K and V, two bytes each.
    assert found["memory"]["kv_bytes_per_token"] == 7 * 1 * 32 * 2 * 2
    assert (found["memory"]["context"], found["memory"]["window"]) == (512, 8)


def test_kv_heads_that_differ_by_layer(tmp_path):
    path = write_tiny("llama_kv_per_layer", tmp_path / "tiny.gguf")
    found = invoke("inspect", path, "--json").json
    assert found["memory"]["kv_bytes_per_token"] == (1 + 4) * 16 * 2 * 2


def test_every_kind_of_value(tmp_path):
    write_every_kind(tmp_path / "kinds.gguf")
    done = invoke("inspect", tmp_path / "kinds.gguf", "--json")
    assert done.code == 0
    kinds = {each["type"] for each in done.json["metadata"].values()}
    assert {"uint8", "int64", "float32", "bool", "string", "string[]"} <= kinds


def test_a_type_that_xpuc_cannot_decode_is_listed_as_such(tmp_path):
    path = tmp_path / "odd.gguf"
    path.write_bytes(gguf_bytes([entry("a", 8, text("b"))], [tensor("w", [256, 1], 17)]))
    done = invoke("inspect", path)
    assert "IQ2_XS" in done.out
    assert "not supported by xpuc" in done.out
    assert "not told by the metadata" in done.out
    assert invoke("inspect", path, "--json").json["tensors"][0]["supported"] is False


def test_a_checkpoint_for_people(checkpoint):
    lines = invoke("inspect", checkpoint).out.splitlines()
    assert lines[0].startswith(f"{checkpoint}: GGUF v3, ")
    headings = [line for line in lines if line and not line.startswith(" ")]
    assert headings[1:] == ["metadata", "types", "tensors", "memory"]
    assert any(line.split()[:2] == ["token_embd.weight", "Q8_0"] for line in lines)


def test_the_manifest_and_the_memory_statement(artifact):
    found = invoke("inspect", artifact, "--json").json
    assert found["manifest"]["arch"] == "llama"
    per_layer = 2 * 2 * 16 * 2
    assert found["kv_bytes_per_token"] == per_layer
    assert found["kv_bytes_of_windows"] == 7 * 4 * per_layer
    assert [pool["n_blocks"] for pool in found["memory"]["pools"]] == [4 * 96 // 4, 4 * 7]
    assert found["memory"]["total"] > found["memory"]["kv_pool"]
    assert found["verified_bytes"] is None


def test_an_artifact_for_people(artifact):
    out = invoke("inspect", artifact).out
    for part in (
        "Tiny (llama), 2 layers",
        "batched decode    off (compiled for one row a step",
        "fuse_qkv  2",
        "weights.safetensors",
        "K/V pool (96 blocks)",
        "K/V pool of 8 (28 blocks)",
        "128 B a token, 3.5 KiB for windows of a sequence",
        "total",
    ):
        assert part in out, part


def test_verify_reads_every_byte(artifact):
    done = invoke("inspect", artifact, "--verify", "--json")
    assert done.json["verified_bytes"] == sum(f.stat().st_size for f in artifact.iterdir())
    assert "all as the manifest says" in invoke("inspect", artifact, "--verify").out


def test_verify_finds_one_flipped_bit_of_the_weights(artifact):
    weights = bytearray((artifact / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (artifact / WEIGHTS).write_bytes(weights)
    assert invoke("inspect", artifact).code == 0
    done = invoke("inspect", artifact, "--verify")
    assert done.code == 2
    assert done.err.startswith(f"error: {artifact / WEIGHTS}: damaged")
    assert len(done.err.splitlines()) == 2


def test_a_checkpoint_cannot_be_verified(checkpoint):
    done = invoke("inspect", checkpoint, "--verify")
    assert done.err == (
        f"error: {checkpoint}: a checkpoint holds no digests to verify\nhint: leave --verify out\n"
    )
