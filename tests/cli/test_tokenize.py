"""`xpuc tokenize`: an artifact and the checkpoint it came from give the same tokens."""

import json

import pytest
from cli_runs import invoke, write_manifest
from tiny_models import write_tiny

from xpuc.artifact import TOKENIZER
from xpuc.frontend.gguf import open_gguf
from xpuc.frontend.tokenizer import convert_tokenizer

TEXT = "Hello world, twice"


@pytest.fixture(scope="module", params=["llama", "llama_spm"])
def checkpoint(request, tmp_path_factory):
    return write_tiny(request.param, tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def artifact(checkpoint, tmp_path):
    spec = convert_tokenizer(open_gguf(checkpoint).metadata, path="tiny.gguf")
    made = write_manifest(tmp_path / "m.xpuc", tokenizer=spec.facts)
    (made / TOKENIZER).write_text(spec.json)
    return made


def test_json_has_ids_and_pieces_that_make_the_text(artifact):
    found = invoke("tokenize", artifact, "-p", TEXT, "--no-bos", "--json").json
    assert list(found) == ["ids", "pieces"]
    assert len(found["ids"]) == len(found["pieces"])
    assert "".join(found["pieces"]).strip() == TEXT


@pytest.mark.parametrize("options", [[], ["--no-bos"], ["--no-special"]], ids=str)
def test_the_checkpoint_says_the_same(artifact, checkpoint, options):
    ours, theirs = (
        invoke("tokenize", each, "-p", TEXT, "--json", *options) for each in (artifact, checkpoint)
    )
    assert ours == theirs
    assert ours.code == 0


def test_special_tokens_are_read_unless_told_otherwise(artifact):
    special = json.loads((artifact / TOKENIZER).read_text())["added_tokens"][0]["content"]
    read = invoke("tokenize", artifact, "-p", special, "--no-bos", "--json").json["ids"]
    spelled = invoke("tokenize", artifact, "-p", special, "--no-bos", "--no-special", "--json").json
    assert len(read) == 1
    assert len(spelled["ids"]) > 1


def test_stdin_is_taken_byte_for_byte(artifact):
    given = invoke("tokenize", artifact, "-p", "a\n", "--json").json
    assert invoke("tokenize", artifact, "--json", stdin="a\n").json == given
    assert invoke("tokenize", artifact, "-p", "a", "--json").json != given


def test_for_people_a_line_a_token(artifact):
    found = invoke("tokenize", artifact, "-p", TEXT, "--json").json
    lines = invoke("tokenize", artifact, "-p", TEXT).out.splitlines()
    assert [int(line.split()[0]) for line in lines] == found["ids"]


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    checkpoint = write_tiny("llama", tmp_path / "tiny.gguf")
    done = invoke("tokenize", checkpoint, "-p", "x", "--tokenizer-pre", "smolm")
    assert done.code == 2
    assert "smolm" in done.err.splitlines()[0]
    assert len(done.err.splitlines()) == 2


def test_an_artifact_has_its_pre_tokenizer(artifact):
    done = invoke("tokenize", artifact, "-p", "x", "--tokenizer-pre", "smollm")
    assert done.code == 2
    assert done.err.splitlines()[0] == (
        f"error: --tokenizer-pre: {artifact} is an artifact, which has one"
    )
