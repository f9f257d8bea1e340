"""Options of a request: defaults, and refusals that say what to give instead."""

from __future__ import annotations

import math
from typing import Any

import pytest

from xpuc.errors import RequestError
from xpuc.runtime.sampling_params import SamplingParams, from_options


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"top_p": 1.5}, "top_p is 1.5", "give a number from 0 to 1"),
        ({"temperature": math.nan}, "temperature is nan", "give a number"),
        ({"top_k": 1.5}, "top_k is 1.5", "give a whole number"),
        ({"max_tokens": 0}, "max_tokens is 0", "give a whole number from 1 up"),
        ({"max_tokens": "9"}, "max_tokens is '9'", "give a whole number from 1 up"),
        ({"seed": -1}, "seed is -1", "give a whole number from 0 to"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, above max_tokens 4", "lower"),
        ({"samplers": "top_k;topp"}, "unknown sampler 'topp'", "did you mean 'top_p'?"),
        ({"samplers": "top_k;top_k"}, "'top_k' stands twice", "once"),
        ({"logit_bias": {3: math.inf}}, "token 3 has bias inf", "-inf keeps"),
        ({"logit_bias": {3: 1e39}}, "token 3 has bias 1e+39", "up to 1e6"),
        ({"logit_bias": {3: "x"}}, "token 3 has bias 'x'", "up to 1e6"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id is -1", "from 0 up"),
        ({"stop": 5}, "stop is 5", "a tuple or a list"),
        ({"dry_breakers": "ab"}, "dry_breakers is 'ab'", "a tuple or a list"),
        ({"stop": ""}, "stop: ''", "at least one character"),
        ({"stop_ids": (-1,)}, "stop_ids is -1", "from 0 up"),
        ({"n": 0}, "n is 0", "from 1 up"),
        ({"dynatemp_range": -1.0}, "dynatemp_range is -1.0", "from 0 up"),
        ({"regex": ""}, "regex: ''", "at least one character"),
        ({"grammar": 5}, "grammar: 5", "at least one character"),
        ({"regex": "a", "json_object": True}, "json_object and regex exclude", "one of them"),
        ({"json_schema": {}, "grammar": "x"}, "json_schema and grammar exclude", "one of them"),
        ({"json_schema": "{"}, "json_schema is not JSON: Expecting property", "a JSON object"),
        ({"json_schema": {"a": {1}}}, "json_schema is not JSON: Object of type set", "a JSON"),
        ({"json_schema": "[1]"}, "json_schema is [1]", "a JSON object or its text"),
        ({"json_schema": "[" * 100_000}, "json_schema is not JSON: maximum recursion", "a JSON"),
        ({"temprature": 1}, "unknown option 'temprature'", "did you mean 'temperature'?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(RequestError) as refused:
        from_options(None, options)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_options_override_params() -> None:
    params = SamplingParams(top_k=7, stop="x")
    changed = from_options(params, {"top_k": 9})
    assert (changed.top_k, changed.stop_strings, params.top_k) == (9, ("x",), 7)


def test_the_grammar_that_is_asked_for() -> None:
    assert SamplingParams().grammar_source is None
    for schema in ({"type": "string"}, '{"type":  "string"}'):
        source = SamplingParams(json_schema=schema).grammar_source
        assert source == ("json_schema", '{"type": "string"}')
    assert SamplingParams(json_schema={}).grammar_source == ("json_schema", "{}")
    assert SamplingParams(json_object=True).grammar_source == ("json_schema", '{"type": "object"}')
    assert SamplingParams(regex="a").grammar_source == ("regex", "a")
    assert SamplingParams(grammar='start: "a"').grammar_source == ("grammar", 'start: "a"')


def test_defaults() -> None:
    """Those of llama.cpp, as engine.md quotes them."""
    p = SamplingParams()
    assert (p.top_k, p.top_p, p.min_p, p.temperature) == (40, 0.95, 0.05, 0.8)
    assert (p.repeat_penalty, p.penalty_last_n) == (1.0, 64)
    assert (p.dry_multiplier, p.dry_base, p.dry_allowed_length) == (0.0, 1.75, 2)
    assert (p.top_n_sigma, p.typical_p, p.xtc_probability) == (-1.0, 1.0, 0.0)
    assert (p.xtc_threshold, p.dynatemp_range, p.dynatemp_exponent) == (0.1, 0.0, 1.0)
    assert (p.n, p.min_tokens, p.ignore_eos, p.logprobs) == (1, 0, False, None)
    assert not p.is_greedy
