"""The gpt2 tokenizer (byte-level BPE): its merges and pre-tokenizer in tokenizer.json terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpuc.errors import FileError
from xpuc.frontend.pretokenizers import DEFAULT, PreTokenizer, pre_tokenizer
from xpuc.frontend.tokenizer_vocab import FIX, Vocab, strings

OVERRIDE = "--tokenizer-pre NAME"
# As pre-tokenizer: bytes become letters. As decoder: back again.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def chosen_pre_tokenizer(
    metadata: Mapping[str, Any], override: str | None, path: str, warnings: list[str]
) -> tuple[str, PreTokenizer]:
    """The pre-tokenizer asked for, else the file's, else the default one with a warning."""
    name = override or metadata.get("tokenizer.ggml.pre")
    if name is None or name == "":
        warnings.append(
            f"tokenizer.ggml.pre is missing: text is cut the default way, which most models were "
            f"not trained with; if answers are poor, name the right one with {OVERRIDE}"
        )
        name = DEFAULT
    if not isinstance(name, str):
        raise FileError(f"{path}: tokenizer.ggml.pre is {name!r}, not a string", FIX)
    return name, pre_tokenizer(name, path)


def merges_in_order(metadata: Mapping[str, Any], vocab: Vocab) -> list[tuple[str, str]]:
    """(left, right) pairs, best first. Pairs that name or make no token cannot apply: left out."""
    pairs: dict[tuple[str, str], None] = {}
    useless = 0
    for merge in strings(metadata, "merges", vocab.path):
        # The first character may itself be a space, so the separator is sought after it.
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocab.ids.keys():
            useless += 1
            continue
        pairs.setdefault((left, right))
    if useless:
        vocab.warnings.append(
            f"tokenizer.ggml.merges: {useless} entries name or make no token: ignored"
        )
    return list(pairs)


def split_steps(family: PreTokenizer) -> dict[str, Any]:
    """The family as a `pre_tokenizer` of tokenizer.json."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in family.patterns
    ]
    if family.byte_level:
        steps.append(BYTE_LEVEL)
    return {"type": "Sequence", "pretokenizers": steps}
