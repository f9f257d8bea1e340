"""The tokenizer of a GGUF: its metadata as a tokenizer.json and the facts the runtime needs.

tokenizer.json is complete for any reader of that format, with two liberties. Control tokens called
"unused" are not listed as added tokens (Gemma has 6,242, and listing them costs 0.2 s at every
load), and xpuc's runtime cuts special tokens out of the text itself, from `facts["token_types"]`,
because the format cannot say "only user-defined ones this time" without changing shared state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xpuc.errors import FileError, UnsupportedError
from xpuc.frontend.chat_templates import builtin_template
from xpuc.frontend.tokenizer_bpe import (
    BYTE_LEVEL,
    chosen_pre_tokenizer,
    merges_in_order,
    split_steps,
)
from xpuc.frontend.tokenizer_spm import SPACE, merges_by_score
from xpuc.frontend.tokenizer_vocab import FIX, Kind, Vocab, flag, read_vocab

SUPPORTED = "supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
_KNOWN_ELSEWHERE = {
    "bert": "WordPiece",
    "t5": "SentencePiece Unigram",
    "rwkv": "RWKV World",
    "plamo2": "PLaMo 2",
    "gemma4": "Gemma 4 BPE",
    "hybriddna": "DNA k-mers",
    "whitespace": "whitespace",
    "none": "no vocabulary",
    "no_vocab": "no vocabulary",
}
# Roles the llama tokenizer gives to ids when the file does not say.
_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True)
class TokenizerSpec:
    """`json` is the text of tokenizer.json; `facts` is plain JSON data for the manifest.

    facts: model ("gpt2" | "llama"), pre, n_vocab, bos_id, eos_id, unk_id, pad_id (id or None),
    eog_ids (ascending), add_bos, add_eos, add_space_prefix, byte_level, token_types (kind ->
    inclusive id ranges, normal tokens left out), lstrip_ids, rstrip_ids, chat_template ("gguf",
    "builtin NAME" or None), warnings.
    """

    json: str
    facts: dict[str, Any]
    chat_template: str | None

    @property
    def warnings(self) -> list[str]:
        """What was doubtful in the file, one sentence each."""
        return list(self.facts["warnings"])


@dataclass(frozen=True)
class _Steps:
    """The parts of tokenizer.json that differ between the two tokenizer models."""

    pre: str | None
    byte_level: bool
    add_bos: bool
    add_space_prefix: bool
    ignore_merges: bool
    unknown: int | None  # stands for what no token spells; None leaves it out of the ids
    merges: list[tuple[str, str]]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    decoder: dict[str, Any]


def convert_tokenizer(
    metadata: Mapping[str, Any], *, path: str, pre: str | None = None
) -> TokenizerSpec:
    """GGUF metadata -> TokenizerSpec. `path` is named in errors, `pre` overrides the file's.

    UnsupportedError: another tokenizer model, or a pre-tokenizer nobody has described.
    FileError: keys missing, of the wrong type or length.
    """
    model = _model_name(metadata, path)
    vocab = read_vocab(metadata, path, _LLAMA_IDS if model == "llama" else {})
    steps = _llama(metadata, vocab) if model == "llama" else _gpt2(metadata, vocab, pre)
    facts = _facts(metadata, vocab, steps, model)
    template, facts["chat_template"] = _chat_template(metadata, vocab)
    return TokenizerSpec(_tokenizer_json(vocab, steps, facts), facts, template)


def _model_name(metadata: Mapping[str, Any], path: str) -> str:
    name = metadata.get("tokenizer.ggml.model")
    if name is None:
        raise FileError(f"{path}: tokenizer.ggml.model is missing", FIX)
    if name not in ("gpt2", "llama"):
        kind = _KNOWN_ELSEWHERE.get(str(name))
        named = f"{name!r} ({kind})" if kind else repr(name)
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.model is {named}, a tokenizer xpuc does not support", SUPPORTED
        )
    return str(name)


def _gpt2(metadata: Mapping[str, Any], vocab: Vocab, override: str | None) -> _Steps:
    name, family = chosen_pre_tokenizer(metadata, override, vocab.path, vocab.warnings)
    normalizer = None if family.byte_level else _space_steps(add_prefix=False)
    return _Steps(
        pre=name,
        byte_level=family.byte_level,
        add_bos=family.add_bos,
        add_space_prefix=False,
        ignore_merges=family.ignore_merges,
        unknown=None,
        merges=merges_in_order(metadata, vocab),
        normalizer=normalizer,
        pre_tokenizer=split_steps(family),
        decoder=BYTE_LEVEL if family.byte_level else _space_decoder(False),
    )


def _llama(metadata: Mapping[str, Any], vocab: Vocab) -> _Steps:
    if vocab.scores is None:
        raise FileError(f"{vocab.path}: tokenizer.ggml.scores is missing", FIX)
    user_defined = frozenset(vocab.of_kind(Kind.USER_DEFINED))
    prefix = flag(metadata, "add_space_prefix", True, vocab.path)
    return _Steps(
        pre=None,
        byte_level=False,
        add_bos=True,
        add_space_prefix=prefix,
        ignore_merges=False,
        unknown=vocab.special.get("unknown"),
        merges=merges_by_score(vocab.tokens, vocab.scores.tolist(), user_defined),
        normalizer=_space_steps(prefix),
        pre_tokenizer=None,
        decoder=_space_decoder(prefix),
    )


def _space_steps(add_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    if add_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _space_decoder(strip_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _facts(metadata: Mapping[str, Any], vocab: Vocab, steps: _Steps, model: str) -> dict[str, Any]:
    ids = vocab.special
    lstrip, rstrip = _stripping(metadata, vocab, steps.pre)
    return {
        "model": model,
        "pre": steps.pre,
        "n_vocab": len(vocab.tokens),
        "bos_id": ids.get("bos"),
        "eos_id": ids.get("eos"),
        "unk_id": ids.get("unknown"),
        "pad_id": ids.get("padding"),
        "eog_ids": vocab.eog_ids,
        "add_bos": _adds(metadata, vocab, "bos", steps.add_bos),
        "add_eos": _adds(metadata, vocab, "eos", False),
        "add_space_prefix": steps.add_space_prefix,
        "byte_level": steps.byte_level,
        "token_types": {
            name: _ranges(vocab.of_kind(*kinds))
            for name, kinds in (
                ("control", (Kind.CONTROL,)),
                ("unknown", (Kind.UNKNOWN,)),
                ("user_defined", (Kind.USER_DEFINED,)),
                ("byte", (Kind.BYTE,)),
                ("unused", (Kind.UNUSED, Kind.UNDEFINED)),
            )
        },
        "lstrip_ids": lstrip,
        "rstrip_ids": rstrip,
        "warnings": vocab.warnings,
    }


def _adds(metadata: Mapping[str, Any], vocab: Vocab, role: str, default: bool) -> bool:
    """Whether prompts get the `role` token; the file decides, else the tokenizer's custom."""
    key = f"add_{role}_token"
    wanted = flag(metadata, key, default, vocab.path)
    if not wanted or role in vocab.special:
        return wanted
    if f"tokenizer.ggml.{key}" in metadata:
        raise FileError(
            f"{vocab.path}: tokenizer.ggml.{key} is true, but tokenizer.ggml.{role}_token_id "
            "is missing",
            FIX,
        )
    vocab.warnings.append(f"tokenizer.ggml.{role}_token_id is missing: prompts go without it")
    return False


def _ranges(ids: list[int]) -> list[list[int]]:
    """Ascending ids as inclusive [first, last] runs: 6,249 control tokens are a dozen runs."""
    runs: list[list[int]] = []
    for token_id in ids:
        if runs and runs[-1][1] == token_id - 1:
            runs[-1][1] = token_id
        else:
            runs.append([token_id, token_id])
    return runs


def _stripping(
    metadata: Mapping[str, Any], vocab: Vocab, pre: str | None
) -> tuple[list[int], list[int]]:
    """Ids that swallow the white space on their left, on their right: no GGUF key tells."""
    name = str(metadata.get("general.name", "")).lower()
    if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code"):
        return [vocab.ids["<mask>"]] if "<mask>" in vocab.ids else [], []
    if "phi-3" in name or "phi3" in name:
        keep = {vocab.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        special = set(vocab.of_kind(Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED))
        if "</s>" in vocab.ids:
            special.add(vocab.ids["</s>"])
        return [], sorted(special - keep)
    if "modern-bert" in name and "[MASK]" in vocab.ids:
        return [vocab.ids["[MASK]"]], []
    return [], []


def _chat_template(metadata: Mapping[str, Any], vocab: Vocab) -> tuple[str | None, str | None]:
    """(template, where it comes from)."""
    template = metadata.get("tokenizer.chat_template")
    if template:
        if not isinstance(template, str):
            raise FileError(f"{vocab.path}: tokenizer.chat_template is not a string", FIX)
        return template, "gguf"
    builtin = builtin_template(vocab.ids)
    if builtin is None:
        return None, None
    name, template = builtin
    return template, f"builtin {name}"


def _tokenizer_json(vocab: Vocab, steps: _Steps, facts: Mapping[str, Any]) -> str:
    # The string form "left right" loads faster than pairs; a pair it cannot say forbids it.
    plain = not any(" " in a or " " in b or a.startswith("#version") for a, b in steps.merges)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocab, facts),
        "normalizer": steps.normalizer,
        "pre_tokenizer": steps.pre_tokenizer,
        "post_processor": _bos_step(vocab, facts),
        "decoder": steps.decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if steps.unknown is None else vocab.tokens[steps.unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": not steps.byte_level,
            "ignore_merges": steps.ignore_merges,
            # In order of text: the library loads the map 0.1 s sooner than in order of id.
            "vocab": dict(sorted(vocab.ids.items())),
            "merges": [f"{a} {b}" for a, b in steps.merges] if plain else steps.merges,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _added_tokens(vocab: Vocab, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = []
    for token_id in vocab.of_kind(Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
        text, is_control = vocab.tokens[token_id], vocab.kinds[token_id] == Kind.CONTROL
        if is_control and "unused" in text:
            continue
        added.append(
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": token_id in facts["lstrip_ids"],
                "rstrip": token_id in facts["rstrip_ids"],
                "normalized": False,
                "special": bool(vocab.kinds[token_id] != Kind.USER_DEFINED),
            }
        )
    return added


def _bos_step(vocab: Vocab, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    if not facts["add_bos"]:
        return None
    bos = facts["bos_id"]
    text = vocab.tokens[bos]
    single: list[dict[str, Any]] = [
        {"SpecialToken": {"id": text, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }
