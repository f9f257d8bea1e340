"""Text to ids and back."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import BYTE, CONTROL, NORMAL, USER, VOCABULARIES
from tokenizer_files import bpe, bpe_with, build, convert, loaded, metadata_of, spm

from xpuc.errors import ArtifactError, RequestError
from xpuc.runtime.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def reference(name):
    return json.loads((GOLDEN / f"tokenizer_{name}.json").read_text())


@pytest.fixture(scope="module")
def smollm2(smollm2_spec):
    return loaded(smollm2_spec)


@pytest.fixture(scope="module")
def gemma3(gemma3_spec):
    return loaded(gemma3_spec)


@cache
def tiny(name):
    return build(metadata_of(VOCABULARIES[name]))


def check_against(tokenizer, expected):
    for case in expected["cases"] + expected["mixed"]:
        text = case["text"]
        assert tokenizer.encode(text, parse_special=False, add_bos=False) == case["plain"], text
        assert tokenizer.encode(text, add_bos=False) == case["special"], text
        assert tokenizer.encode(text) == case.get("bos_special", tokenizer.encode(text)), text
        assert tokenizer.decode(case["plain"]) == case["detok_plain"], text
    for prompt in expected["prompts"].values():
        assert tokenizer.encode(prompt["text"]) == prompt["token_ids"], prompt["text"]


@pytest.mark.model
def test_smollm2_gives_llama_cpp_s_ids(smollm2):
    check_against(smollm2, reference("smollm2"))


@pytest.mark.model
@pytest.mark.slow
def test_gemma3_gives_llama_cpp_s_ids(gemma3):
    check_against(gemma3, reference("gemma3"))


@pytest.mark.model
def test_smollm2_round_trip(smollm2):
    # The vocabulary lacks the bytes of some control characters and rare planes.
    @given(st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0xFFFF)))
    def check(text):
        assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text

    check()


@given(TEXTS)
def test_bpe_round_trip(text):
    tokenizer = tiny("smollm")
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(TEXTS.filter(lambda text: "\u2581" not in text), st.sampled_from(["llama-spm", "gemma-spm"]))
def test_sentencepiece_round_trip(text, name):
    tokenizer = tiny(name)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False, add_bos=False)) == text


def test_control_tokens_are_parsed_only_when_asked():
    tokenizer = tiny("smollm")
    text = "hello<|im_end|>hello"
    end = tokenizer.eos_id
    assert end in tokenizer.encode(text)
    assert end not in tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == "hellohello"


def test_user_defined_tokens_are_always_parsed():
    tokenizer = build(bpe_with({"<tool>": USER}))
    tool = tokenizer.n_vocab - 1
    for parse_special in (False, True):
        ids = tokenizer.encode("a<tool>b", parse_special=parse_special)
        assert tokenizer.pieces(ids) == ["a", "<tool>", "b"]
        assert ids[1] == tool
    assert tokenizer.decode([tool], skip_special=True) == "<tool>"  # it is text, not markup


def test_unused_control_tokens_are_parsed_though_the_json_leaves_them_out():
    tokenizer = build(bpe_with({"<unused7>": CONTROL}))
    assert tokenizer.encode("<unused7>") == [tokenizer.n_vocab - 1]
    assert len(tokenizer.encode("<unused7>", parse_special=False)) == len("<unused7>")


def test_the_longest_special_token_wins_over_the_leftmost():
    tokenizer = build(bpe_with({"<ab": CONTROL, "b>>>": CONTROL}))
    assert tokenizer.pieces(tokenizer.encode("<ab>>>x")) == ["<", "a", "b>>>", "x"]
    assert tokenizer.pieces(tokenizer.encode("<ab>")) == ["<ab", ">"]


def test_special_tokens_that_swallow_white_space():
    right = build(spm({"\u2581": -1.0, "a": -2.0}, control=["<|end|>"]) | {"general.name": "phi3"})
    assert right.pieces(right.encode("a<|end|> \n a", add_bos=False)) == [
        " ",
        "a",
        "<|end|>",
        " ",
        "a",
    ]
    left = build(bpe_with({"<mask>": CONTROL}), pre="jina-v2-de")
    assert left.pieces(left.encode("a \t<mask> a")) == ["a", "<mask>", " a"]


def test_begin_and_end_tokens():
    tokenizer = tiny("llama-spm")
    assert tokenizer.add_bos
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.encode("<s>") == [
        bos,
        bos,
    ]  # as the text says; a chat template may not want it
    plain = tiny("smollm")
    assert plain.encode("") == []
    assert plain.encode("", add_bos=True) == [plain.bos_id]
    ends = build(spm({"\u2581": -1.0, "a": -2.0}, add_eos_token=True))
    assert ends.encode("a")[-1] == eos
    assert eos not in ends.encode("a", add_bos=False)


def test_no_begin_token_to_add():
    tokenizer = build(bpe(bos_token_id=None))
    with pytest.raises(RequestError, match="the model has no begin token"):
        tokenizer.encode("a", add_bos=True)


def test_a_space_goes_before_every_piece_of_plain_text():
    tokenizer = build(spm({"\u2581": -1.0, "a": -2.0, "\u2581a": -0.5}, control=["<x>"]))
    assert tokenizer.pieces(tokenizer.encode("aa<x>a", add_bos=False)) == [" a", "a", "<x>", " a"]


def test_the_space_before_the_first_word_is_not_text():
    tokenizer = tiny("llama-spm")
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids, skip_special=True) == "hello world"
    assert tokenizer.decode(ids) == "<s> hello world"
    assert tokenizer.decode(ids[1:]) == "hello world"
    assert tokenizer.decode(ids[1:], continued=True) == " hello world"
    gemma = tiny("gemma-spm")
    assert gemma.decode(gemma.encode(" hello", add_bos=False)) == " hello"


def test_bytes_stand_in_for_unknown_characters():
    tokenizer = tiny("gemma-spm")
    ids = tokenizer.encode("\u00e9", add_bos=False)
    first = VOCABULARIES["gemma-spm"].tokens.index("<0x00>")
    assert ids == [first + 0xC3, first + 0xA9]
    assert tokenizer.pieces(ids) == ["\ufffd", "\ufffd"]
    assert tokenizer.decode(ids) == "\u00e9"


def test_what_tokens_of_each_type_show():
    tokenizer = build(
        bpe_with(
            {"[PAD7]": 5, "\u2581x": USER, "\u0120y": NORMAL, "<0x41>": BYTE, "\u4e2d": NORMAL}
        )
    )
    n = tokenizer.n_vocab
    assert tokenizer.pieces(range(n - 5, n)) == ["", "\u2581x", " y", "A", "\u4e2d"]


@pytest.mark.parametrize("name", VOCABULARIES)
@given(data=st.data())
def test_streaming_says_what_decoding_at_once_says(name, data):
    tokenizer = tiny(name)
    options = {
        "skip_special": data.draw(st.booleans()),
        "continued": data.draw(st.booleans()),
    }
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=30))
    stream = tokenizer.stream(**options)
    parts = [stream.push(i) for i in ids] + [stream.finish()]
    assert "".join(parts) == tokenizer.decode(ids, **options)


@pytest.mark.parametrize("name", VOCABULARIES)
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_streaming_never_shows_half_a_character(name, text):
    tokenizer = tiny(name)
    stream, shown = tokenizer.stream(), ""
    for token_id in tokenizer.encode(text, parse_special=False, add_bos=False):
        shown += stream.push(token_id)
        assert "\ufffd" not in shown
        assert text.replace("\u2581", " ").startswith(shown.replace("\u2581", " "))
    assert stream.finish() == ""


def test_a_character_that_never_closes_is_shown_at_the_end():
    tokenizer = tiny("gemma-spm")
    stream = tokenizer.stream()
    assert stream.push(VOCABULARIES["gemma-spm"].tokens.index("<0xE2>")) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_outside_the_vocabulary(token_id):
    tokenizer = tiny("smollm")
    with pytest.raises(RequestError) as error:
        tokenizer.decode([token_id])
    assert error.value.message == f"token id {token_id} is outside the vocabulary"
    assert error.value.hint == f"ids run from 0 to {tokenizer.n_vocab - 1}"


def test_text_that_is_not_unicode():
    with pytest.raises(RequestError, match=r"character 2 is half of a UTF-16 pair"):
        tiny("smollm").encode("ab\ud800")


def test_loading_a_file(tmp_path):
    spec = convert(bpe())
    path = tmp_path / "tokenizer.json"
    path.write_text(spec.json, encoding="utf-8")
    ids = tiny("smollm").encode("hello world")
    assert Tokenizer.from_files(path, spec.facts).encode("hello world") == ids


def test_loading_from_an_artifact(tmp_path, monkeypatch):
    spec = convert(bpe())
    (tmp_path / "tokenizer.json").write_text(spec.json, encoding="utf-8")
    manifests = {tmp_path: SimpleNamespace(tokenizer=spec.facts)}
    monkeypatch.setattr("xpuc.runtime.tokenizer.read_manifest", manifests.__getitem__)
    assert load_tokenizer(str(tmp_path)).decode([3]) == tiny("smollm").decode([3])


@pytest.mark.parametrize("text", [None, "{", "{}", '{"version": "2.0"}'])
def test_a_file_that_is_no_tokenizer(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    facts = convert(bpe()).facts
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_files(path, facts)
