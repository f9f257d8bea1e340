"""Text to token ids and back, as the artifact's tokenizer.json and the manifest's facts say.

Special tokens are cut out of the text here, in the order llama.cpp cuts them (longest first); only
what lies between them goes through `tokenizers`. Decoding works on bytes: a token is a byte string,
which may be half a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from xpuc.artifact import TOKENIZER, read_manifest
from xpuc.errors import ArtifactError, RequestError

_SPACE = "\u2581"
_STRIPPED = " \t\n\v\f\r"
# token_types of the manifest, as small numbers: 0 is a normal token.
_CONTROL, _UNKNOWN, _USER_DEFINED, _BYTE, _UNUSED = range(1, 6)
_TYPES = {
    "control": _CONTROL,
    "unknown": _UNKNOWN,
    "user_defined": _USER_DEFINED,
    "byte": _BYTE,
    "unused": _UNUSED,
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return alphabet


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """One loaded tokenizer; safe to use from several threads."""

    def __init__(self, model: tokenizers.Tokenizer, facts: Mapping[str, Any]) -> None:
        # What is cut out here must not be found again in the text between.
        model.encode_special_tokens = True
        self._model = model
        self.facts = facts
        self.n_vocab: int = facts["n_vocab"]
        self.bos_id: int | None = facts["bos_id"]
        self.eos_id: int | None = facts["eos_id"]
        self.eog_ids: frozenset[int] = frozenset(facts["eog_ids"])
        self.add_bos: bool = facts["add_bos"]
        self._types = bytearray(self.n_vocab)
        for name, runs in facts["token_types"].items():
            for first, last in runs:
                self._types[first : last + 1] = bytes([_TYPES[name]]) * (last - first + 1)
        self._bytes: dict[int, bytes] = {}
        self._specials: dict[str, list[tuple[str, int]]] | None = None

    @classmethod
    def from_files(cls, path: Path | str, facts: Mapping[str, Any]) -> Tokenizer:
        """Loads tokenizer.json; ArtifactError if it is missing or no tokenizer."""
        try:
            model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise ArtifactError(
                f"{path}: not a readable tokenizer: {error}", "compile the model again"
            ) from error
        return cls(model, facts)

    def encode(
        self, text: str, *, parse_special: bool = True, add_bos: bool | None = None
    ) -> list[int]:
        """Token ids of `text`.

        parse_special: "<eos>" in the text is the control token, else plain text; user-defined
        tokens are found either way. add_bos: None as the model wants it, True always, False
        neither begin nor end token. A byte that no token spells is left out (some byte-level
        vocabularies lack rare ones). RequestError for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: character {error.start} is half of a UTF-16 pair (a lone surrogate)",
                "give the text as valid UTF-8",
            ) from None
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            ids.append(self._bos())
        for piece in self._cut(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._model.encode(piece, add_special_tokens=False).ids)
        if self.facts["add_eos"] and add_bos is not False:
            ids.append(self.facts["eos_id"])
        return ids

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = False, continued: bool = False
    ) -> str:
        """The text of `ids`, U+FFFD where the bytes are not UTF-8.

        skip_special leaves out control tokens. continued: the ids follow other text, so a leading
        space is text and not the one that encoding put before the first word.
        """
        raw = b"".join(self._shown(token_id, skip_special) for token_id in ids)
        if self.facts["add_space_prefix"] and not continued:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def stream(self, *, skip_special: bool = False, continued: bool = False) -> StreamDecoder:
        """Decodes token by token what `decode` with the same options decodes at once."""
        return StreamDecoder(self, skip_special=skip_special, continued=continued)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id alone; U+FFFD for a part of a character."""
        return [self.token_bytes(token_id).decode(errors="replace") for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; RequestError for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def is_control(self, token_id: int) -> bool:
        """Whether the token is markup (control, unknown) rather than text."""
        return self._types[token_id] in (_CONTROL, _UNKNOWN)

    def _bos(self) -> int:
        if self.bos_id is None:
            raise RequestError(
                "the model has no begin token", "encode without add_bos (it expects none)"
            )
        return self.bos_id

    def _shown(self, token_id: int, skip_special: bool) -> bytes:
        raw = self.token_bytes(token_id)
        return b"" if skip_special and self.is_control(token_id) else raw

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.n_vocab:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary",
                f"ids run from 0 to {self.n_vocab - 1}",
            )
        text = self._text(token_id)
        match self._types[token_id]:
            case 0 if self.facts["byte_level"]:
                return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in text)
            case 0:
                return text.replace(_SPACE, " ").encode()
            case kind if kind == _BYTE:
                return bytes([int(text[3:5], 16)])  # <0xE2>
            case kind if kind == _UNUSED:
                return b""
            case _:
                return text.encode()

    def _text(self, token_id: int) -> str:
        text: str | None = self._model.id_to_token(token_id)
        assert text is not None, f"tokenizer.json has no token {token_id}"
        return text

    def _cut(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` as plain pieces and the ids of special tokens between them."""
        pieces: list[str | int] = [text]
        for special, token_id in self._present(text, parse_special):
            pieces = [part for piece in pieces for part in self._cut_at(piece, special, token_id)]
        return [piece for piece in pieces if piece != ""]

    def _cut_at(self, piece: str | int, special: str, token_id: int) -> Iterator[str | int]:
        if isinstance(piece, int):
            yield piece
            return
        strips_left = token_id in self.facts["lstrip_ids"]
        strips_right = token_id in self.facts["rstrip_ids"]
        start = 0
        while (at := piece.find(special, start)) >= 0:
            before = piece[start:at]
            yield before.rstrip(_STRIPPED) if strips_left else before
            yield token_id
            start = at + len(special)
            while strips_right and start < len(piece) and piece[start] in _STRIPPED:
                start += 1
        yield piece[start:]

    def _present(self, text: str, parse_special: bool) -> list[tuple[str, int]]:
        """(text, id) of the special tokens that occur in `text`, longest first."""
        if self._specials is None:
            self._specials = self._specials_by_prefix()
        found = [
            (special, token_id)
            for prefix, group in self._specials.items()
            if prefix in text
            for special, token_id in group
            if special in text and (parse_special or self._types[token_id] == _USER_DEFINED)
        ]
        return sorted(found, key=lambda item: (-len(item[0].encode()), item[1]))

    def _specials_by_prefix(self) -> dict[str, list[tuple[str, int]]]:
        """Special tokens by their first three letters: most texts rule out all but a few groups."""
        groups: dict[str, list[tuple[str, int]]] = {}
        for name in ("control", "unknown", "user_defined"):
            for first, last in self.facts["token_types"][name]:
                for token_id in range(first, last + 1):
                    text = self._text(token_id)
                    groups.setdefault(text[:3], []).append((text, token_id))
        return groups


class StreamDecoder:
    """Text as tokens arrive: whole characters only, constant work per token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, continued: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._at_prefix = tokenizer.facts["add_space_prefix"] and not continued
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain once `token_id` has come; "" while a character is open."""
        raw = self._tokenizer._shown(token_id, self._skip_special)
        if raw and self._at_prefix:
            self._at_prefix = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never closed, else ""."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(artifact: Path | str) -> Tokenizer:
    """The tokenizer of an artifact; ArtifactError if it is no artifact or the file is damaged."""
    directory = Path(artifact)
    return Tokenizer.from_files(directory / TOKENIZER, read_manifest(directory).tokenizer)
