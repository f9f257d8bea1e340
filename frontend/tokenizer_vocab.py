"""The vocabulary of a GGUF: token texts, what kind each is, and which ids mean begin and end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import FileError

FIX = "the file is damaged or was written by a broken converter; convert the model again"


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

# Tokens that end a generation whatever their type says. GGUF has keys for some of them only.
_END_OF_GENERATION = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[e~[",
)

# Fill-in-the-middle roles: GGUF keys, then the texts that mark the role where no key does.
_FIM_ROLES = {
    "pre": (
        ("fim_pre", "prefix"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> "
        "\u2581<PRE> <|code_prefix|> <|prefix|>",
    ),
    "suf": (
        ("fim_suf", "suffix"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> "
        "\u2581<SUF> <|code_suffix|> <|suffix|>",
    ),
    "mid": (
        ("fim_mid", "middle"),
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> "
        "\u2581<MID> <|code_middle|> <|middle|>",
    ),
    "pad": (("fim_pad",), "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "rep": (("fim_rep",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "sep": (("fim_sep",), "<|file_sep|>"),
}
_FIM_ENDS = ("pad", "rep", "sep")  # a completion that reaches one of these has left its gap
_HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass
class Vocab:
    """Tokens by id. `warnings` collects what was doubtful; a human reads it."""

    path: str
    tokens: list[str]
    kinds: NDArray[np.int8]  # (n_vocab,) of Kind
    scores: NDArray[np.float32] | None  # (n_vocab,)
    special: dict[str, int] = field(default_factory=dict)  # "bos" -> id, only where there is one
    eog_ids: list[int] = field(default_factory=list)  # ascending
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def of_kind(self, *kinds: Kind) -> list[int]:
        """Ids of these kinds, ascending."""
        return [int(i) for i in np.flatnonzero(np.isin(self.kinds, kinds))]


def read_vocab(metadata: Mapping[str, Any], path: str, defaults: Mapping[str, int]) -> Vocab:
    """The vocabulary under `tokenizer.ggml.*`; `defaults` are ids a tokenizer model implies.

    FileError names the key that is missing, short or of the wrong type.
    """
    tokens = strings(metadata, "tokens", path)
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    kinds = numbers(metadata, "token_type", len(tokens), path)
    if kinds is None:
        kinds = np.full(len(tokens), Kind.NORMAL)
    kinds = np.where((kinds < 0) | (kinds > Kind.BYTE), Kind.UNDEFINED, kinds).astype(np.int8)
    scores = numbers(metadata, "scores", len(tokens), path)
    vocab = Vocab(path, tokens, kinds, None if scores is None else scores.astype(np.float32))
    _check_unique(vocab)
    _check_bytes(vocab)
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = _special_id(vocab, metadata, (role,), defaults.get(role))
        if token_id is not None:
            vocab.special[role] = token_id
    vocab.eog_ids = sorted(_ends_of_generation(vocab, metadata))
    return vocab


def strings(metadata: Mapping[str, Any], name: str, path: str) -> list[str]:
    """The string array tokenizer.ggml.`name`."""
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise FileError(f"{path}: {key} is missing", FIX)
    value = metadata[key]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FileError(f"{path}: {key} is not an array of strings", FIX)
    if not value:
        raise FileError(f"{path}: {key} is empty", FIX)
    return value


def numbers(
    metadata: Mapping[str, Any], name: str, at_least: int, path: str
) -> NDArray[Any] | None:
    """The first `at_least` values of the array tokenizer.ggml.`name`, None where there is none."""
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        return None
    value = np.asarray(metadata[key])
    if value.ndim != 1 or value.dtype.kind not in "iuf":
        raise FileError(f"{path}: {key} is not an array of numbers", FIX)
    if len(value) < at_least:
        raise FileError(
            f"{path}: {key} holds {len(value)} values for {at_least} tokens",
            FIX,
        )
    return value[:at_least]


def flag(metadata: Mapping[str, Any], name: str, default: bool, path: str) -> bool:
    """The boolean tokenizer.ggml.`name`."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool | np.bool_):
        raise FileError(f"{path}: tokenizer.ggml.{name} is {value!r}, not true or false", FIX)
    return bool(value)


def _check_unique(vocab: Vocab) -> None:
    if len(vocab.ids) == len(vocab.tokens):
        return
    # `ids` keeps the last id of a text, so the first whose id differs has a double.
    first = next(i for i, token in enumerate(vocab.tokens) if vocab.ids[token] != i)
    token = vocab.tokens[first]
    raise FileError(
        f"{vocab.path}: tokenizer.ggml.tokens has {token!r} twice, as {first} "
        f"and as {vocab.ids[token]}",
        FIX,
    )


def _check_bytes(vocab: Vocab) -> None:
    for token_id in vocab.of_kind(Kind.BYTE):
        if not _BYTE_TOKEN.fullmatch(vocab.tokens[token_id]):
            raise FileError(
                f"{vocab.path}: tokenizer.ggml.token_type makes a byte of token {token_id}, "
                f"{vocab.tokens[token_id]!r}, which is not like <0x41>",
                FIX,
            )


def _special_id(
    vocab: Vocab, metadata: Mapping[str, Any], roles: Iterable[str], default: int | None
) -> int | None:
    if default is not None and default >= len(vocab.tokens):
        default = None
    for role in roles:
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in metadata:
            continue
        token_id = metadata[key]
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise FileError(f"{vocab.path}: {key} is {token_id!r}, not a token id", FIX)
        if 0 <= token_id < len(vocab.tokens):
            return int(token_id)
        vocab.warnings.append(f"{key} is {token_id}, outside the vocabulary: ignored")
    return default


def _ends_of_generation(vocab: Vocab, metadata: Mapping[str, Any]) -> set[int]:
    """Gathered as llama.cpp does: by key, and by text, which also makes a token a control one."""
    ends = {vocab.special[role] for role in ("eos", "eot", "eom") if role in vocab.special}
    for role, (keys, texts) in _FIM_ROLES.items():
        token_id = _special_id(vocab, metadata, keys, None)
        if token_id is None:
            token_id = next((vocab.ids[t] for t in texts.split() if t in vocab.ids), None)
            if token_id is not None:
                vocab.kinds[token_id] = Kind.CONTROL
        if token_id is not None and role in _FIM_ENDS:
            ends.add(token_id)
    for text in _END_OF_GENERATION:
        if text in vocab.ids:
            ends.add(vocab.ids[text])
            vocab.kinds[vocab.ids[text]] = Kind.CONTROL
    for text in _HARMONY_MARKS:
        if text in vocab.ids:
            vocab.kinds[vocab.ids[text]] = Kind.USER_DEFINED
    return ends - _not_ends(vocab, ends)


def _not_ends(vocab: Vocab, ends: set[int]) -> set[int]:
    """Texts that end a turn elsewhere but separate parts of one in a few families."""

    kept_open: set[int] = set()
    ending = {vocab.tokens[token_id] for token_id in ends}
    calls, answers = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
    if "<|end|>" in ending and ending & calls and ending & answers:
        kept_open.add(vocab.ids["<|end|>"])
        vocab.kinds[vocab.ids["<|end|>"]] = Kind.USER_DEFINED
    if {"<|tool_response>", "</s>"} <= ending:
        kept_open.add(vocab.ids["</s>"])
        vocab.kinds[vocab.ids["</s>"]] = Kind.NORMAL
    return kept_open
