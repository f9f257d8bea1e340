"""GGUF metadata to tokenizer.json and facts."""

import json
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CONTROL, NORMAL, USER, VOCABULARIES
from tokenizer_files import bpe, bpe_with, build, convert, metadata_of, spm

from xpuc.errors import FileError, UnsupportedError

UNUSED = 5


@pytest.mark.model
def test_facts_of_smollm2(smollm2_spec):
    assert smollm2_spec.facts == {
        "model": "gpt2",
        "pre": "smollm",
        "n_vocab": 49152,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 0,
        "pad_id": 2,
        "eog_ids": [0, 2, 4],  # <|endoftext|> <|im_end|> <reponame>
        "add_bos": False,
        "add_eos": False,
        "add_space_prefix": False,
        "byte_level": True,
        "token_types": {
            "control": [[0, 16]],
            "unknown": [],
            "user_defined": [],
            "byte": [],
            "unused": [],
        },
        "lstrip_ids": [],
        "rstrip_ids": [],
        "chat_template": "gguf",
        "warnings": [],
    }


@pytest.mark.model
@pytest.mark.slow
def test_facts_of_gemma3(gemma3_spec):
    facts = gemma3_spec.facts
    assert (facts["model"], facts["n_vocab"], facts["bos_id"], facts["eos_id"]) == (
        "llama", 262144, 2, 1,
    )  # fmt: skip
    assert facts["eog_ids"] == [1, 106, 212]  # <eos> <end_of_turn> </s>
    assert facts["add_bos"]
    assert not facts["add_space_prefix"]
    assert facts["token_types"]["byte"] == [[238, 493]]
    assert facts["chat_template"] == "builtin gemma"
    # One merge a token at most: every split of every token would be 514,847.
    assert len(json.loads(gemma3_spec.json)["model"]["merges"]) == 236245


def test_facts_are_plain_json():
    for words in VOCABULARIES.values():
        facts = convert(metadata_of(words)).facts
        assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_json_stands_alone(name):
    """Another reader of tokenizer.json gets the same ids, begin token and specials included."""
    words = VOCABULARIES[name]
    metadata = metadata_of(words)
    alone = tokenizers.Tokenizer.from_str(convert(metadata).json)
    text = f"the world{words.tokens[words.eos]}hello he"
    ids = alone.encode(text).ids
    assert ids == build(metadata).encode(text)
    assert words.eos in ids
    assert (ids[0] == words.bos) == words.add_bos
    assert alone.decode(ids, skip_special_tokens=True).replace(" ", "") == "theworldhellohe"


@pytest.mark.parametrize(
    ("model", "kind"),
    [("bert", "WordPiece"), ("t5", "Unigram"), ("rwkv", "RWKV"), ("plamo2", "PLaMo")],
)
def test_other_tokenizers_are_refused_by_name(model, kind):
    with pytest.raises(UnsupportedError) as error:
        convert(bpe(model=model))
    assert error.value.message.startswith(f"model.gguf: tokenizer.ggml.model is {model!r} (")
    assert kind in error.value.message
    assert error.value.hint == "supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)"


def test_an_unheard_of_tokenizer_is_refused():
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.model is 'abacus', a tokenizer"):
        convert(bpe(model="abacus"))


TOKENS = ["<unk>", "<s>", "</s>", "a", "b"]
TYPES = np.array([2, 3, 3, 1, 1], np.int32)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not an array of strings"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": [*TOKENS[:4], "<s>"]}, "tokenizer.ggml.tokens has '<s>' twice, as 1 and as 4"),
        ({"token_type": TYPES[:4]}, "tokenizer.ggml.token_type holds 4 values for 5 tokens"),
        ({"token_type": "x"}, "tokenizer.ggml.token_type is not an array of numbers"),
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": np.zeros(2, np.float32)}, "tokenizer.ggml.scores holds 2 values for 5 tokens"),
        ({"bos_token_id": "1"}, "tokenizer.ggml.bos_token_id is '1', not a token id"),
        ({"add_bos_token": 3}, "tokenizer.ggml.add_bos_token is 3, not true or false"),
        (
            {"token_type": np.array([2, 3, 6, 1, 1], np.int32)},
            "tokenizer.ggml.token_type makes a byte of token 2, '</s>', which is not like <0x41>",
        ),
    ],
)
def test_malformed_metadata_names_the_key(changes, found):
    keys = {
        "model": "llama", "tokens": TOKENS, "token_type": TYPES, "scores": np.zeros(5, np.float32),
    }  # fmt: skip
    convert({f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    keys |= changes
    with pytest.raises(FileError) as error:
        convert({f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None})
    assert error.value.message == f"model.gguf: {found}"


@pytest.mark.parametrize("merges", [None, ["a b", 1], "a b"])
def test_malformed_merges(merges):
    with pytest.raises(FileError, match=r"tokenizer\.ggml\.merges"):
        convert(bpe(merges=merges))


def test_merges_that_cannot_apply_are_left_out_with_a_warning():
    spec = convert(bpe(merges=["h e", "no such", "nospace", "q z"]))
    assert json.loads(spec.json)["model"]["merges"] == ["h e"]
    assert spec.warnings == ["tokenizer.ggml.merges: 3 entries name or make no token: ignored"]


def test_a_merge_named_twice_keeps_its_first_rank():
    # "ell" is both "e ll" and "el l"; the repetition must not push "l l" behind "h e".
    tokenizer = build(bpe_with({"el": NORMAL}, merges=["l l", "e l", "h e", "l l"]))
    assert tokenizer.pieces(tokenizer.encode("ell")) == ["e", "ll"]


def test_merges_with_a_space_in_a_token_are_kept():
    metadata = bpe_with(
        {"x y": NORMAL, "y": USER, " ": NORMAL, " y": NORMAL}, merges=["  y", "h e"]
    )
    del metadata["tokenizer.ggml.tokens"][-3]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][:-1]
    assert json.loads(convert(metadata).json)["model"]["merges"] == [[" ", "y"], ["h", "e"]]


def test_bad_special_ids_are_ignored_with_a_warning():
    spec = convert(bpe(bos_token_id=10**6, padding_token_id=-1))
    assert spec.facts["bos_id"] is None
    assert spec.facts["pad_id"] is None
    assert [w.split(" is ")[0] for w in spec.warnings] == [
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.padding_token_id",
    ]


def test_begin_and_end_tokens_by_default_and_by_key():
    pieces = {"\u2581": -1.0, "a": -2.0}
    llama = convert(spm(pieces)).facts
    assert (llama["bos_id"], llama["eos_id"], llama["unk_id"]) == (1, 2, 0)
    assert (llama["add_bos"], llama["add_eos"], llama["add_space_prefix"]) == (True, False, True)
    gpt2 = convert(bpe(bos_token_id=None, eos_token_id=None)).facts
    assert (gpt2["bos_id"], gpt2["eos_id"], gpt2["add_bos"]) == (None, None, False)
    assert convert(bpe(), pre="llama-bpe").facts["add_bos"]
    assert not convert(bpe(add_bos_token=False), pre="llama-bpe").facts["add_bos"]
    ends = convert(
        spm(pieces, add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    ).facts
    assert (ends["add_bos"], ends["add_eos"], ends["add_space_prefix"]) == (False, True, False)


def test_a_begin_token_that_does_not_exist():
    # Asked for by the file: an error. The family's custom: a warning.
    with pytest.raises(FileError, match=r"add_bos_token is true, but .*bos_token_id is missing"):
        convert(bpe(bos_token_id=None, add_bos_token=True))
    spec = convert(bpe(bos_token_id=None), pre="llama-bpe")
    assert not spec.facts["add_bos"]
    assert spec.warnings == ["tokenizer.ggml.bos_token_id is missing: prompts go without it"]


def eog(extra, **changes):
    """The end-of-generation texts that `extra` tokens add to the tiny vocabulary's own two."""
    metadata = bpe_with(extra, **changes)
    facts = convert(metadata).facts
    tokens = metadata["tokenizer.ggml.tokens"]
    assert facts["eog_ids"] == sorted(facts["eog_ids"])
    return {tokens[i] for i in facts["eog_ids"]} - {"<|endoftext|>", "<|im_end|>"}


def test_end_of_generation_by_text():
    ends = [
        "<|eot_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<|eom_id|>",
        "[EOS]",
        "<eos>",
    ]
    assert eog(dict.fromkeys([*ends, "<stop>"], CONTROL)) == set(ends)
    # Whatever their type says, and then they are control tokens.
    assert eog({"<|eot_id|>": NORMAL}) == {"<|eot_id|>"}
    types = convert(bpe_with({"<|eot_id|>": NORMAL})).facts["token_types"]
    assert types["control"][-1] == [len(VOCABULARIES["smollm"].tokens)] * 2


def test_end_of_generation_by_key():
    n = len(VOCABULARIES["smollm"].tokens)
    extra = {"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL, "<d>": CONTROL}
    keys = {
        "eos_token_id": n,
        "eot_token_id": n + 1,
        "eom_token_id": n + 2,
        "fim_pad_token_id": n + 3,
    }
    assert eog(extra, **keys) == set(extra)


def test_fill_in_the_middle_roles():
    texts = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]
    # All become control tokens, and the ones that close the gap end the generation.
    metadata = bpe_with(dict.fromkeys(texts, NORMAL))
    assert eog(dict.fromkeys(texts, NORMAL)) == {"<|fim_pad|>", "<|file_sep|>"}
    n = len(VOCABULARIES["smollm"].tokens)
    assert convert(metadata).facts["token_types"]["control"] == [[0, 2], [n, n + 4]]


def test_turn_parts_that_do_not_end_a_generation():
    assert eog(dict.fromkeys(["<|end|>", "<|return|>", "<|call|>"], CONTROL)) == {
        "<|return|>",
        "<|call|>",
    }
    assert eog(dict.fromkeys(["<|end|>", "<|flush|>", "<|calls|>"], CONTROL)) == {
        "<|flush|>",
        "<|calls|>",
    }
    assert eog(dict.fromkeys(["<|end|>", "<|return|>"], CONTROL)) == {"<|end|>", "<|return|>"}
    assert eog({"</s>": NORMAL, "<|tool_response>": CONTROL}) == {"<|tool_response>"}
    n = len(VOCABULARIES["smollm"].tokens)
    types = convert(bpe_with({"<|channel|>": CONTROL})).facts["token_types"]
    assert types["user_defined"] == [[n, n]]


def test_unused_control_tokens_stay_out_of_the_json():
    extra = {"<unused0>": CONTROL, "<used>": CONTROL, "[PAD]": UNUSED, "<u>": USER}
    spec = convert(bpe_with(extra))
    added = {t["content"]: t["special"] for t in json.loads(spec.json)["added_tokens"]}
    assert added == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<used>": True,
        "<u>": False,
        "[PAD]": True,  # by its text a fill-in-the-middle role, so a control token
    }


def test_empty_tokens_get_a_name():
    spec = convert(bpe_with({"": NORMAL}))
    n = len(VOCABULARIES["smollm"].tokens)
    assert json.loads(spec.json)["model"]["vocab"][f"[EMPTY_{n}]"] == n


def test_white_space_swallowed_by_special_tokens():
    metadata = spm({"\u2581": -1.0}, control=["<|end|>", "<|endoftext|>"])
    assert convert(metadata).facts["rstrip_ids"] == []
    phi = convert(metadata | {"general.name": "Phi-3 mini"}).facts
    assert phi["rstrip_ids"] == [2, 259]  # </s> <|end|>, but not <unk> <s> <|endoftext|>
    jina = convert(bpe_with({"<mask>": CONTROL}), pre="jina-v2-de").facts
    assert jina["lstrip_ids"] == [len(VOCABULARIES["smollm"].tokens)]


def test_chat_template_of_the_file_comes_first():
    gemma = spm({"\u2581": -1.0}, control=["<start_of_turn>", "<end_of_turn>"])
    spec = convert(gemma | {"tokenizer.chat_template": "{{ messages }}"})
    assert (spec.chat_template, spec.facts["chat_template"]) == ("{{ messages }}", "gguf")
    assert convert(gemma).facts["chat_template"] == "builtin gemma"
    assert convert(bpe()).facts["chat_template"] == "builtin chatml"
    none = convert(spm({"\u2581": -1.0}))
    assert (none.chat_template, none.facts["chat_template"]) == (None, None)
    with pytest.raises(FileError, match="chat_template is not a string"):
        convert(gemma | {"tokenizer.chat_template": 7})


def joined(text, scores):
    """SentencePiece as it is defined: the best-scored neighbours join, the leftmost of equals."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


LETTERS = "abc\u2581"


@settings(max_examples=50)
@given(
    pieces=st.lists(st.text(LETTERS, min_size=2, max_size=6), unique=True, max_size=40),
    data=st.data(),
)
def test_sentencepiece_joins_by_score(pieces, data):
    pieces = [*LETTERS, *pieces]
    ranks = data.draw(st.permutations(range(len(pieces))))
    scores = dict(zip(pieces, (-float(r) for r in ranks), strict=True))
    tokenizer = build(spm(scores, add_space_prefix=False))
    for text in data.draw(st.lists(st.text("abc ", min_size=1, max_size=24), max_size=5)):
        pieces = [p.replace("\u2581", " ") for p in joined(text.replace(" ", "\u2581"), scores)]
        assert tokenizer.pieces(tokenizer.encode(text, add_bos=False)) == pieces


@settings(max_examples=50)
@given(longest=st.integers(2, 9), length=st.integers(1, 40))
def test_equal_scores_grow_from_the_left(longest, length):
    runs = {"\u2581" * n: -1000.0 for n in range(1, longest + 1)}
    tokenizer = build(spm(runs, add_space_prefix=False))
    got = tokenizer.pieces(tokenizer.encode(" " * length, add_bos=False))
    assert got == [p.replace("\u2581", " ") for p in joined("\u2581" * length, runs)]


def test_one_merge_a_token():
    scores = {
        "a": -9.0,
        "b": -9.0,
        "c": -9.0,
        "ab": -1.0,
        "bc": -2.0,
        "abc": -3.0,
        "cab": -4.0,
        "ca": -5.0,
    }
    # "abc" is only ever "ab" + "c"; "cab" is "c" + "ab", never "ca" + "b". "abca" nobody reaches.
    spec = convert(spm(scores | {"bab": -6.0, "aab": -7.0}))
    assert json.loads(spec.json)["model"]["merges"] == [
        "a b", "b c", "ab c", "c ab", "c a", "b ab", "a ab",
    ]  # fmt: skip
