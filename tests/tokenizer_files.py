"""Small tokenizers for tests: metadata as a GGUF reader gives it, and what xpuc makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers
from tiny_tokenizers import BYTE, CONTROL, NORMAL, UNKNOWN, USER, VOCABULARIES, Vocabulary

from xpuc.frontend.tokenizer import TokenizerSpec, convert_tokenizer
from xpuc.runtime.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."


def metadata_of(words: Vocabulary, **changes: Any) -> dict[str, Any]:
    """The metadata of a tiny vocabulary; `changes` are tokenizer.ggml keys, None takes one out."""
    keys = {
        "model": words.model,
        "pre": words.pre,
        "tokens": list(words.tokens),
        "token_type": np.array(words.types, np.int32),
        "scores": None if words.scores is None else np.array(words.scores, np.float32),
        "merges": words.merges,
        "bos_token_id": words.bos,
        "eos_token_id": words.eos,
        "unknown_token_id": words.unknown,
        "add_bos_token": words.add_bos or None,
        "add_space_prefix": False if "<bos>" in words.tokens else None,
    }
    keys |= changes
    return {PREFIX + key: value for key, value in keys.items() if value is not None}


def bpe(**changes: Any) -> dict[str, Any]:
    """Byte-level BPE with three control tokens first."""
    return metadata_of(VOCABULARIES["smollm"], **changes)


def bpe_with(extra: Mapping[str, int], **changes: Any) -> dict[str, Any]:
    """`bpe` with more tokens behind: text -> type."""
    words = VOCABULARIES["smollm"]
    types = np.array([*words.types, *extra.values()], np.int32)
    return bpe(tokens=[*words.tokens, *extra], token_type=types, **changes)


def spm(
    pieces: Mapping[str, float],
    *,
    user: Iterable[str] = (),
    control: Iterable[str] = (),
    **changes: Any,
) -> dict[str, Any]:
    """SentencePiece: <unk> <s> </s>, 256 bytes, control and user-defined tokens, then pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    for texts, kind in ((control, CONTROL), (user, USER), (pieces, NORMAL)):
        tokens += texts
        types += [kind] * (len(tokens) - len(types))
    scores = [0.0] * (len(tokens) - len(pieces)) + list(pieces.values())
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
    }
    return {PREFIX + key: value for key, value in (keys | changes).items() if value is not None}


def convert(metadata: Mapping[str, Any], **options: Any) -> TokenizerSpec:
    return convert_tokenizer(metadata, path="model.gguf", **options)


def loaded(spec: TokenizerSpec) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(spec.json), spec.facts)


def build(metadata: Mapping[str, Any], **options: Any) -> Tokenizer:
    """Metadata straight to a loaded tokenizer."""
    return loaded(convert(metadata, **options))


def words(metadata: Mapping[str, Any], text: str, **options: Any) -> list[str]:
    """The words `text` is cut into before any merging."""
    steps = tokenizers.Tokenizer.from_str(convert(metadata, **options).json).pre_tokenizer
    assert steps is not None
    return [text[start:end] for _, (start, end) in steps.pre_tokenize_str(text)]
