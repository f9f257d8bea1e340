"""Answers that follow a JSON schema, a regular expression or a grammar, through llguidance.

A grammar says which tokens may come next; the sampler then sees no others. llguidance is given the
bytes of every token, so a token that spells half a character or two words is judged by what it
spells. Markup (control tokens) spells nothing; the end of the answer is decided here, not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from xpuc.errors import FieldError, XpucError
from xpuc.runtime.candidates import Mask
from xpuc.runtime.sampling_params import GrammarKind, SamplingParams

_N_COMPILED = 64
_MAX_MESSAGE = 300  # characters; llguidance quotes a whole regular expression
# What may stand between the tokens of JSON; as in llama.cpp's grammar it has an end, since small
# models like to go on with blanks. A schema's own "x-guidance" overrides it.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
_HINTS: dict[GrammarKind, str] = {
    "json_schema": "mend the schema, or leave out what llguidance does not support",
    "regex": "write it as Rust's regex crate reads it, which has no look-around",
    "grammar": "write llguidance's Lark (`start: ...`) or llama.cpp's GBNF (`root ::= ...`)",
}


class Vocabulary(Protocol):
    """What a grammar needs of a tokenizer."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog_ids(self) -> Collection[int]: ...

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def is_control(self, token_id: int, /) -> bool: ...


class GrammarState:
    """Where one request's answer stands in its grammar. It follows accepted tokens only, so a
    preempted request keeps it, and each of several answers has its own.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._n_vocab = vocabulary.n_vocab
        self._ends = sorted(vocabulary.eog_ids)
        self._allowed: Mask | None = None

    @property
    def allowed(self) -> Mask:
        """True for ids that may come next (n_vocab,), tokens that end the answer only where it may
        end. At a dead end there is none: `problem` then says what llguidance knows of it.
        """
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            unpacked = np.unpackbits(bits, count=self._n_vocab, bitorder="little")
            unpacked[self._ends] = self._matcher.is_accepting()
            self._allowed = unpacked.view(np.bool_)
        return self._allowed

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing can be added to it."""
        is_whole: bool = self._matcher.is_accepting()
        return is_whole and np.count_nonzero(self.allowed) == len(self._ends)

    @property
    def problem(self) -> str:
        """What llguidance says of a dead end, in one line."""
        return _one_line(self._matcher.get_error()) or "nothing may follow"

    def accept(self, id_: int) -> bool:
        """Go on by a token that does not end the answer; False if the grammar forbids it, and
        nothing can follow then."""
        self._allowed = None
        return bool(self._matcher.consume_token(id_))


class Grammars:
    """The grammars of one vocabulary, each compiled once.

    The first one takes longer, two seconds with 260,000 tokens: llguidance reads them all.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._words: Any = None
        self._compiled = lru_cache(_N_COMPILED)(self._compile)

    def start(self, params: SamplingParams) -> GrammarState | None:
        """The beginning of an answer; None if the request asks for no grammar.

        RequestError if the grammar does not compile or no answer can begin, or if there is no
        tokenizer; XpucError if llguidance is not installed.
        """
        source = params.grammar_source
        if source is None:
            return None
        if self._vocabulary is None:
            raise FieldError(source[:1], " needs a tokenizer", "leave it out")
        return GrammarState(self._compiled(*source).deep_copy(), self._vocabulary)

    def _compile(self, kind: GrammarKind, text: str) -> Any:
        llguidance = _llguidance()
        try:
            if kind == "json_schema":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, _JSON_OPTIONS)
            else:
                grammar = llguidance.grammar_from(kind, text)
        except ValueError as error:
            raise _refusal(kind, str(error)) from error
        assert self._vocabulary is not None
        if self._words is None:
            self._words = _read_vocabulary(llguidance, self._vocabulary)
        matcher = llguidance.LLMatcher(self._words, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error())
        beginning = GrammarState(matcher, self._vocabulary)
        if not beginning.allowed.any():
            raise _refusal(kind, f"no answer can begin ({beginning.problem})")
        return matcher


class _Words:
    """A vocabulary as llguidance.TokenizerWrapper wants it.

    llguidance knows one end token or, newer, several; here it gets one that the model does not
    have, behind all others, and GrammarState puts the model's own in its place.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        n = vocabulary.n_vocab
        self._vocabulary = vocabulary
        self.eos_token_id = n
        self.tokens = [*map(vocabulary.token_bytes, range(n)), b""]
        spell_nothing = (i for i in range(n) if vocabulary.is_control(i) or not self.tokens[i])
        self._markup = {*spell_nothing, *vocabulary.eog_ids, n}
        self.special_token_ids = sorted(self._markup)
        self.longest_first: Callable[[str], list[int]] | None = None

    def __call__(self, raw: bytes) -> list[int]:
        """The tokens of a text that the grammar leaves no choice about; they are the only ones it
        allows, so they must spell it exactly."""
        text = raw.decode()
        ids = self._vocabulary.encode(text, add_bos=False)
        spelled = b"".join(self.tokens[id_] for id_ in ids)
        if spelled == raw and self._markup.isdisjoint(ids):
            return ids
        # The tokenizer put a space before it, or took it for markup.
        return [] if self.longest_first is None else self.longest_first(text)


def _read_vocabulary(llguidance: Any, vocabulary: Vocabulary) -> Any:
    words = _Words(vocabulary)
    read = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
    words.longest_first = read.greedy_tokenize
    return read


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise XpucError(
            "llguidance is not installed; a JSON schema, regex or grammar needs it",
            "pip install 'xpuc[grammar]'",
        ) from None
    return llguidance


def _refusal(kind: GrammarKind, error: str) -> FieldError:
    return FieldError([kind], f" does not compile: {_one_line(error)}", _HINTS[kind])


def _one_line(error: str) -> str:
    """llguidance's message without the quoted source and the parser's state."""
    message = re.split(r"^(?: +\d+ \||<state>)", error, maxsplit=1, flags=re.MULTILINE)[0]
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " ..."
