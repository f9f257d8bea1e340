"""What a request asks of the sampler and when it wants to stop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from xpuc.errors import FieldError, RequestError, nearest

DEFAULT_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

GrammarKind = Literal["json_schema", "regex", "grammar"]


class _Range(NamedTuple):
    kind: type
    low: float
    high: float


_ANY = math.inf
_RANGES = {
    "n": _Range(int, 1, _ANY),
    "temperature": _Range(float, -_ANY, _ANY),
    "dynatemp_range": _Range(float, 0.0, _ANY),
    "dynatemp_exponent": _Range(float, 0.0, _ANY),
    "top_k": _Range(int, -_ANY, _ANY),
    "top_p": _Range(float, 0.0, 1.0),
    "min_p": _Range(float, 0.0, 1.0),
    "typical_p": _Range(float, 0.0, 1.0),
    "top_n_sigma": _Range(float, -_ANY, _ANY),
    "xtc_probability": _Range(float, 0.0, 1.0),
    "xtc_threshold": _Range(float, 0.0, 1.0),
    "repeat_penalty": _Range(float, 1e-6, 1e6),
    "frequency_penalty": _Range(float, -1e6, 1e6),
    "presence_penalty": _Range(float, -1e6, 1e6),
    "penalty_last_n": _Range(int, -1, _ANY),
    "dry_multiplier": _Range(float, 0.0, _ANY),
    "dry_base": _Range(float, 0.0, _ANY),
    "dry_allowed_length": _Range(int, 1, _ANY),
    "dry_last_n": _Range(int, -1, _ANY),
    "min_keep": _Range(int, 0, _ANY),
    "min_tokens": _Range(int, 0, _ANY),
}
_ID = _Range(int, 0, _ANY)
_OPTIONAL_RANGES = {
    "max_tokens": _Range(int, 1, _ANY),
    "logprobs": _Range(int, 0, 1000),
    "draft_max": _Range(int, 0, _ANY),
    "seed": _Range(int, 0, 2**128 - 1),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request; the defaults are llama.cpp's (engine.md, section 8).

    Values that switch a sampler off: top_k <= 0, top_p = 1, min_p = 0, typical_p = 1,
    top_n_sigma <= 0, xtc_probability = 0, repeat_penalty = 1 with frequency_penalty and
    presence_penalty 0, dry_multiplier = 0, dynatemp_range = 0. temperature <= 0 is greedy. A
    penalty_last_n or dry_last_n of -1 means the whole context, 0 switches the penalty off.
    With a dynatemp_range r the temperature lies between temperature - r and temperature + r, at
    the (entropy / largest entropy) ** dynatemp_exponent of the way.

    n answers to the prompt; the i-th has the seed `seed` + i. A seed of None draws one; Result.seed
    tells it. max_tokens None runs to the end of the context. logprobs = k asks for the log
    probability (nats) of each token and of the k likeliest, both of the model's own distribution,
    before logit_bias, grammar and samplers.

    ignore_eos: an end-of-generation token is never chosen. Below min_tokens no stop string counts
    and neither such a token nor one of stop_ids is chosen; cancelling and the end of the context
    stop the request all the same.

    draft_max: most tokens of a draft, where the engine drafts; None: as many as the engine does, 0:
    none. It changes how fast an answer comes, never the answer.

    json_schema (a JSON object or its text), json_object (any JSON object), regex (of the whole
    answer, as Rust's regex crate reads it) and grammar (llguidance's Lark or llama.cpp's GBNF)
    exclude each other. Only tokens that continue the answer are chosen, an end-of-generation token
    only where the answer may end. An answer that nothing can be added to stops the request,
    whatever min_tokens and ignore_eos say.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    samplers: str | tuple[str, ...] = DEFAULT_ORDER
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_keep: int = 0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    draft_max: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            _check(name, getattr(self, name), allowed)
        for name, allowed in _OPTIONAL_RANGES.items():
            if (value := getattr(self, name)) is not None:
                _check(name, value, allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                ["min_tokens"],
                f" is {self.min_tokens}, above max_tokens {self.max_tokens}",
                "lower min_tokens, or raise max_tokens",
            )
        _check_order(self.order)
        _check_bias(self.logit_bias)
        _check_list("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        _check_list("dry_breakers", self.dry_breakers)
        _check_list("stop_ids", self.stop_ids)
        _check_texts("stop", self.stop_strings)
        _check_texts("dry_breakers", self.dry_breakers)
        for id_ in self.stop_ids:
            _check("stop_ids", id_, _ID)
        _check_grammars(self)

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers in the order they run; `samplers` may be one `;`-separated text."""
        if isinstance(self.samplers, str):
            return tuple(name.strip() for name in self.samplers.split(";") if name.strip())
        return tuple(self.samplers)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def grammar_source(self) -> tuple[GrammarKind, str] | None:
        """What the answer must follow, and its text; None if it is free."""
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        if self.json_schema is not None:
            return "json_schema", _json_text(self.json_schema)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0


def from_options(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """`params`, or the defaults, with `options` in place of its fields; RequestError names a
    field that does not exist."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"params is of type {type(params).__name__}",
            "give a SamplingParams, or its fields by name: temperature=0",
        )
    known = [each.name for each in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise RequestError(f"unknown option {name!r}", nearest(name, known))
    return replace(params or SamplingParams(), **options)


def _check(name: str, value: Any, allowed: _Range, what: str = "") -> None:
    kinds = (int, float) if allowed.kind is float else (int,)
    word = "a number" if allowed.kind is float else "a whole number"
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not allowed.low <= value <= allowed.high:
        raise FieldError([name], f"{what} is {value!r}", f"give {word}{_between(allowed)}")


def _between(allowed: _Range) -> str:
    low, high = (
        f"{edge:g}" if isinstance(edge, float) else str(edge)
        for edge in (allowed.low, allowed.high)
    )
    if math.isinf(allowed.low):
        return "" if math.isinf(allowed.high) else f" up to {high}"
    return f" from {low} up" if math.isinf(allowed.high) else f" from {low} to {high}"


def _check_order(order: tuple[str, ...]) -> None:
    for name in order:
        if name not in DEFAULT_ORDER:
            hint = nearest(name, DEFAULT_ORDER)
            raise FieldError(["samplers"], f": unknown sampler {name!r}", hint)
        if order.count(name) > 1:
            raise FieldError(["samplers"], f": {name!r} stands twice", "name each sampler once")


def _check_bias(bias: Mapping[int, float]) -> None:
    for id_, value in bias.items():
        _check("logit_bias", id_, _ID, ": token id")
        is_banned = value == -math.inf
        if not is_banned and not (isinstance(value, (int, float)) and abs(value) <= 1e6):
            raise FieldError(
                ["logit_bias"],
                f": token {id_} has bias {value!r}",
                "give a number up to 1e6; -inf keeps the token from being chosen",
            )


def _check_list(name: str, given: Any) -> None:
    # A bare text would be taken for a list of its characters.
    if not isinstance(given, (tuple, list)):
        raise FieldError([name], f" is {given!r}", "give a tuple or a list")


def _check_texts(name: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        if not isinstance(text, str) or not text:
            raise FieldError([name], f": {text!r}", "give texts of at least one character")


def _check_grammars(params: SamplingParams) -> None:
    names = ("json_schema", "json_object", "regex", "grammar")
    given = [name for name in names if getattr(params, name) not in (None, False)]
    if len(given) > 1:
        raise FieldError(given, " exclude each other", "give one of them")
    _check_texts("regex", () if params.regex is None else (params.regex,))
    _check_texts("grammar", () if params.grammar is None else (params.grammar,))
    if params.json_schema is not None:
        _json_text(params.json_schema)


def _json_text(schema: Any) -> str:
    """The text of a JSON object given as one or as its text."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "give a JSON object or its text"
        raise FieldError(["json_schema"], f" is not JSON: {error}", hint) from None
    if not isinstance(value, Mapping):
        raise FieldError(["json_schema"], f" is {text}", "give a JSON object or its text")
    return text
