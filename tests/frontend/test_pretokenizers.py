"""How each tokenizer.ggml.pre name cuts text into words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import NORMAL
from tokenizer_files import bpe, bpe_with, build, convert, words

from xpuc.errors import UnsupportedError
from xpuc.frontend.pretokenizers import PRE_TOKENIZERS, pre_tokenizer

TEXT = "I'M we'll 12345 camelCase  x=\u00b2\n\n \u6c49\u5b57?!"
HAN = "\u6c49\u5b57"
THREES = ["123", "45"]
DIGITS = list("12345")
TAIL = [" ", " x", "=", "\u00b2", "\n\n", f" {HAN}", "?!"]
TAIL_HAN = [*TAIL[:-2], " ", HAN, "?!"]
LLAMA3 = ["I", "'M", " we", "'ll", " ", *THREES, " camelCase", *TAIL]
QWEN2 = ["I", "'M", " we", "'ll", " ", *DIGITS, " camelCase", *TAIL]
WORDS = {
    "default": ["I", "'", "M", " we", "'", "ll", " ", *THREES, " camelCase", *TAIL],
    "llama-bpe": LLAMA3,
    "dbrx": LLAMA3,
    "jais-2": LLAMA3,
    "minicpm5": LLAMA3,
    "gpt-2": ["I", "'", "M", " we", "'ll", " 12345", " camelCase", *TAIL],
    "smollm": ["I", "'", "M", " we", "'ll", " ", *DIGITS, " camelCase", *TAIL],
    "qwen2": QWEN2,
    "qwen35": QWEN2,
    "ufakzeka": QWEN2,
    "laguna": QWEN2,
    "seed-coder": QWEN2,
    "bailingmoe": QWEN2,
    "exaone-moe": QWEN2,
    "tekken": ["I", "'M", " we", "'ll", " ", *DIGITS, " camel", "Case", *TAIL],
    "gpt-4o": ["I'M", " we'll", " ", *THREES, " camel", "Case", *TAIL],
    "granite-embed-multi-97m": ["I'M", " we'll", " ", *THREES, " camel", "Case", *TAIL],
    "tiny_aya": ["I'M", " we'll", " ", "12", "345", " camel", "Case", *TAIL],
    "kimi-k2": ["I'M", " we'll", " ", *THREES, " camel", "Case", *TAIL_HAN],
    "youtu": ["I'M", " we'll", " ", *DIGITS, " camel", "Case", *TAIL_HAN],
    "deepseek-v3": ["I", "'M", " we", "'ll", " ", *THREES, " camelCase", *TAIL_HAN],
    "afmoe": ["I", "'M", " we", "'ll", " ", "12", "345", " camelCase", *TAIL_HAN],
    "falcon": ["I", "'", "M", " we", "'", "ll", " ", *THREES, " camelCase", *TAIL],
    "bloom": ["I'M", " we'll", " 12345", " camelCase", " ", " x=\u00b2", "\n\n", f" {HAN}", "?!"],
    "superbpe": ["I'M we'll ", "12", "345", " camelCase  x=", "\u00b2", f"\n\n {HAN}?!"],
    "gemma4": ["I'M we'll 12345 camelCase  x=\u00b2", "\n\n", f" {HAN}?!"],
}


@pytest.mark.parametrize(("pre", "expected"), WORDS.items())
def test_each_family_cuts_as_its_checkpoints_do(pre, expected):
    assert words(bpe(), TEXT, pre=pre) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_name_compiles_and_loses_no_text(pre):
    text = TEXT + " <sentinel:1> IMGIMGABZ \t\u3000\uff01\u0e01 e\u0301 \u00df\U0001f642  "
    assert "".join(words(bpe(), text, pre=pre)) == text
    if PRE_TOKENIZERS[pre].byte_level:
        tokenizer = build(bpe(), pre=pre)
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "gpt-2", "qwen2", "gpt-4o", "deepseek-v3"])
def test_round_trip(pre):
    tokenizer = build(bpe(), pre=pre)

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False, add_bos=False)) == text

    check()


def test_a_lookahead_sees_no_further_than_its_piece():
    # The digits are their own pieces, so the space before them is at the end of its piece.
    assert words(bpe(), "a  1", pre="smollm") == ["a", "  ", "1"]
    assert words(bpe(), "a  1", pre="gpt-2") == ["a", " ", " 1"]


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", ["hero"]), ("gpt-2", ["he", "r", "o"])]
)
def test_words_that_are_tokens_need_no_merge_where_the_family_says_so(pre, expected):
    tokenizer = build(bpe_with({"hero": NORMAL}, merges=["h e"]), pre=pre)
    assert tokenizer.pieces(tokenizer.encode("hero", add_bos=False)) == expected


def test_an_unknown_name_is_refused_with_the_flag_to_use():
    with pytest.raises(UnsupportedError) as error:
        pre_tokenizer("llama-bp", "m.gguf")
    assert error.value.message == (
        "m.gguf: tokenizer.ggml.pre is 'llama-bp', a pre-tokenizer xpuc does not know"
    )
    assert "--tokenizer-pre NAME" in error.value.hint
    assert "did you mean 'llama-bpe'?" in error.value.hint


def test_the_flag_overrides_the_file():
    assert words(bpe(pre="nobody-knows"), "a12", pre="qwen2") == ["a", "1", "2"]
    with pytest.raises(UnsupportedError, match="nobody-knows"):
        words(bpe(pre="nobody-knows"), "a12")


def test_no_name_means_the_default_and_a_warning():
    spec = convert(bpe(pre=None))
    assert spec.facts["pre"] == "default"
    assert len(spec.warnings) == 1
    assert "--tokenizer-pre NAME" in spec.warnings[0]
    assert not convert(bpe()).warnings
