"""How gpt2-BPE tokenizers cut text into words before merging: every `tokenizer.ggml.pre` name.

A pre-tokenizer is a list of regular expressions (Oniguruma syntax, the one `tokenizers` speaks).
Each isolates its matches inside the pieces the one before it left, so a lookahead sees no further
than its piece. Names and expressions are facts of the checkpoints. Where the engine that named them
approximates an expression because its own regex engine cannot say it, the checkpoint's original
stands here (upper- and lower-case classes, Han intersection, possessive repeats).
"""

from __future__ import annotations

from dataclasses import dataclass

from xpuc.errors import UnsupportedError, nearest


@dataclass(frozen=True)
class PreTokenizer:
    """The word patterns of one family and what its tokenizers do by default."""

    patterns: tuple[str, ...]
    byte_level: bool = True  # False: tokens are plain text with U+2581 for a space
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False


def _expand(ranges: str) -> str:
    """A character class body from hexadecimal ranges: "41-5A B5" -> "A-Zµ"."""
    return "".join(
        "-".join(chr(int(end, 16)) for end in item.split("-")) for item in ranges.split()
    )


_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}|{_SYMBOLS}"


def _cased(contraction: str, numbers: str, newlines: str, without: str = "") -> str:
    """Words that end where lower case turns to upper: the o200k shape."""
    head = r"[^\r\n\p{L}\p{N}]?"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    words = f"{head}{upper}*{lower}+{contraction}|{head}{upper}+{lower}*{contraction}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{newlines}]*|{_LINES}"


_O200K = _cased(f"{_ANY_CASE}?", r"\p{N}{1,3}", "/")
_NO_HAN = r"&&[^\p{Han}]"

_CJK_KANA = "[" + _expand("4E00-9FA5 3040-309F 30A0-30FF") + "]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
_DEEPSEEK_CJK = "[" + _expand("4E00-9FA5 0800-4E00 AC00-D7FF") + "]+"
_CASED_LETTERS = _expand(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_WIDE_PUNCTUATION = _expand("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_ASIAN_SCRIPTS = _expand(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF 0E40-0E7F 0E80-0EFF "
    "1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_YOUTU_SCRIPTS = "|".join(
    f"[{_expand(ranges)}]+"
    for ranges in (
        "AC00-D7A3 3131-318E",
        "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F",
        "3105-312F",
        "4E00-9FA5 3040-309F 30A0-30FF",
    )
)
_BLOOM = r" ?[^(\s|.,!?" + _expand("2026 3002 FF0C 3001 0964 06D4 060C") + ")]+"
_JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_SPACE_RUNS = r"[^\n]+|[\n]+"

DEFAULT = "default"

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
        "gigachat a.x-4.0 mellum modern-bert mpt olmo jais exaone4 trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
            )
        ),
    ),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}",))),
    ("laguna", PreTokenizer((_SPACE_RUNS, _QWEN2))),
    (
        "minicpm5",
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_ANY_CASE}|{_WORD}|\p{{N}}+|{_SYMBOLS}"), ignore_merges=True
        ),
    ),
    (
        "seed-coder",
        PreTokenizer((rf"{_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
                rf"|\s*[\r\n]+|{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}",
            )
        ),
    ),
    (
        "tekken",
        PreTokenizer((_cased("", r"\p{N}", "/"),), ignore_merges=True, add_bos=True),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_O200K,))),
    ("granite-embed-multi-97m", PreTokenizer((_O200K,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    (
        "kimi-k2",
        PreTokenizer(
            (r"[\p{Han}]+|" + _cased(f"{_ANY_CASE}?", r"\p{N}{1,3}", "", without=_NO_HAN),)
        ),
    ),
    (
        "youtu",
        PreTokenizer((_YOUTU_SCRIPTS, _cased(f"{_ANY_CASE}?", r"\p{N}", "/")), ignore_merges=True),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                rf"\s?[{_WIDE_PUNCTUATION}]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
    ),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CJK_KANA,
                rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
                r"\p{N}",
            )
        ),
    ),
    (
        "afmoe",
        PreTokenizer(
            # Digits in threes counted from the right.
            (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", f"[{_ASIAN_SCRIPTS}]+", _DEEPSEEK3)
        ),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-\/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    (
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((_SPACE_RUNS,), byte_level=False, add_bos=True),
    ),
    ("sarvam-moe", PreTokenizer((_SPACE_RUNS,), byte_level=False)),
    ("whitespace", PreTokenizer((r"\S+",), byte_level=False)),
)

PRE_TOKENIZERS = {name: family for names, family in _FAMILIES for name in names.split()}


def pre_tokenizer(name: str, path: str) -> PreTokenizer:
    """The family of a `tokenizer.ggml.pre` name; UnsupportedError for one nobody has described."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.pre is {name!r}, a pre-tokenizer xpuc does not know",
            f"if it cuts words as a known one does, say --tokenizer-pre NAME; "
            f"{nearest(name, PRE_TOKENIZERS)}",
        )
    return PRE_TOKENIZERS[name]
