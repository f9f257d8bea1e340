"""Grammars: what they let through, when they end an answer, what they refuse."""

from __future__ import annotations

import json
import math
import re
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizer_files
from fake_model import FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import VOCABULARIES

from xpuc.errors import RequestError, XpucError
from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.grammar import Grammars, GrammarState
from xpuc.runtime.sampler import Chain
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.runtime.sequence import State
from xpuc.runtime.tokenizer import Tokenizer

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue é", "🙂"]}, "maxItems": 2},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null")
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}"
array  ::= "[" ws ( value ("," ws value)* )? "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) ){0,4} "\""
number ::= "-"? ([0-9] | [1-9] [0-9]{0,3}) ("." [0-9]{1,2})?
ws     ::= " "?
"""


@cache
def tokenizer(name: str = "smollm") -> Tokenizer:
    return tokenizer_files.build(tokenizer_files.metadata_of(VOCABULARIES[name]))


@cache
def grammars(name: str = "smollm") -> Grammars:
    return Grammars(tokenizer(name))


def start(name: str = "smollm", **asked: Any) -> GrammarState:
    state = grammars(name).start(SamplingParams(**asked))
    assert state is not None
    return state


def ids_of(state: GrammarState) -> list[int]:
    return np.flatnonzero(state.allowed).tolist()


def walk(state: GrammarState, words: Tokenizer, seed: int, most: int = 2000) -> bytes:
    """A random answer to its end, every token of it one that the grammar allows."""
    random = np.random.default_rng(seed)
    spelled = b""
    for _ in range(most):
        id_ = int(random.choice(ids_of(state)))
        if id_ in words.eog_ids:
            return spelled
        assert not words.is_control(id_)
        assert state.accept(id_)
        spelled += words.token_bytes(id_)
        if state.is_complete:
            return spelled
    pytest.fail(f"no end after {most} tokens: {spelled[:200]!r}")


def is_person(value: Any) -> bool:
    """Whether PERSON describes it."""
    known = {"name", "age", "tags", "ok"}
    return (
        {"name", "age"} <= value.keys() <= known
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 120
        and set(value.get("tags", [])) <= {"red", "blue é", "🙂"}
        and value.get("ok") in (True, False, None)
    )


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_a_random_walk_through_a_schema_ends_in_what_it_describes(name: str, seed: int) -> None:
    spelled = walk(start(name, json_schema=PERSON), tokenizer(name), seed)
    assert is_person(json.loads(spelled.decode()))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_a_random_walk_through_a_regex_ends_in_a_match(seed: int) -> None:
    regex = r"(hello|the cat) [0-9]{2,4}( and [a-zé]{0,3}🙂?)?"
    text = walk(start(regex=regex), tokenizer(), seed).decode()
    assert re.fullmatch(regex, text)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_llama_cpps_grammars_and_larks_are_read(seed: int) -> None:
    pair = 'root ::= "(" inner ")"\ninner ::= [a-c] | root\n'
    for grammar in (pair, 'start: "(" inner ")"\ninner: /[a-c]/ | start\n'):
        text = walk(start(grammar=grammar), tokenizer(), seed).decode()
        assert re.fullmatch(r"\(+[a-c]\)+", text)
        assert text.count("(") == text.count(")")


def test_the_json_grammar_of_llama_cpp() -> None:
    state = start(grammar=JSON_GBNF)
    for id_ in tokenizer().encode('{"a\\n": [-1.5, {"b":null}, true]'):
        assert state.allowed[id_]
        assert state.accept(id_)
    assert not state.is_complete
    assert state.accept(tokenizer().encode("}")[0])
    assert state.is_complete


def test_any_json_object() -> None:
    for text in ("{}", '{"a": [1, {"b": "é"}], "c": null}'):
        state = start(json_object=True)
        assert all(state.accept(id_) for id_ in tokenizer().encode(text))
        assert state.is_complete
    assert not start(json_object=True).accept(tokenizer().encode("[")[0])


def test_an_end_is_allowed_where_the_answer_may_end_and_only_there() -> None:
    words = tokenizer()
    state = start(regex="ab?")
    assert not set(ids_of(state)) & words.eog_ids
    assert state.accept(words.encode("a")[0])
    assert set(ids_of(state)) == {*words.eog_ids, words.encode("b")[0]}
    assert not state.is_complete
    assert state.accept(words.encode("b")[0])
    assert state.is_complete


def test_what_only_looks_like_markup_is_text() -> None:
    words = tokenizer()
    text = walk(start(regex=re.escape("a<|im_end|>")), words, 0)
    assert text == b"a<|im_end|>"


def test_a_space_before_words_does_not_shift_them() -> None:
    """Llama 2's tokenizer encodes "hello" as " hello"."""
    words = tokenizer("llama-spm")
    assert words.decode(words.encode("hello", add_bos=False), continued=True) == " hello"
    assert walk(start("llama-spm", regex="hello world"), words, 0) == b"hello world"


def test_states_do_not_share_what_they_accepted() -> None:
    words = tokenizer()
    one, other = start(regex="ab|cd"), start(regex="ab|cd")
    assert one.accept(words.encode("a")[0])
    assert other.accept(words.encode("c")[0])
    assert ids_of(one) == words.encode("b")
    assert ids_of(other) == words.encode("d")


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(tokenizer())
    for _ in range(3):
        made.start(SamplingParams(json_schema=PERSON))
    made.start(SamplingParams(json_schema=json.dumps(PERSON)))
    assert made._compiled.cache_info().misses == 1
    assert made.start(SamplingParams()) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "[a"}, "regex does not compile: at 1(8): invalid regex"),
        ({"json_schema": {"type": "stirng"}}, "json_schema does not compile: Invalid type: stirng"),
        (
            {"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}},
            "minLength (3) is greater than maxLength (2)",
        ),
        ({"grammar": "start: foo"}, 'at 1(8): unknown name: "foo"'),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"grammar": "start: start"}, "grammar does not compile: no answer can begin"),
        ({"json_schema": {"$ref": "http://a/b"}}, "'http://a/b' is not present"),
        ({"regex": "(" * 1000}, "(((( ..."),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"grammar": "x := 3"}, "Expected ::= at line 1"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_in_two_lines(
    asked: dict[str, Any], message: str
) -> None:
    engine = Engine(FakeModel(n_vocab=tokenizer().n_vocab), tokenizer())
    with pytest.raises(RequestError) as refused:
        engine.add_request("hello", **asked)
    assert message in refused.value.message
    assert "\n" not in refused.value.message + refused.value.hint
    assert len(refused.value.message) < 400
    assert not engine.has_work


def test_a_grammar_needs_a_tokenizer_and_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="regex needs a tokenizer"):
        Engine(FakeModel()).generate([1], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(XpucError, match=r"pip install 'xpuc\[grammar\]'"):
        Grammars(tokenizer()).start(SamplingParams(regex="a"))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(
        [
            {"temperature": 0},
            {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            {"typical_p": 0.5, "xtc_probability": 0.9, "xtc_threshold": 0.01},
            {"top_n_sigma": 0.5, "presence_penalty": 2.0, "dry_multiplier": 1.0},
            {"samplers": "temperature;top_p;penalties", "repeat_penalty": 2.0},
        ]
    ),
)
def test_no_chain_lets_a_forbidden_token_through(seed: int, options: dict[str, Any]) -> None:
    random = np.random.default_rng(seed)
    logits = (random.integers(-200, 200, 300) / 10).astype(np.float32)
    allowed = random.random(290) < random.choice([0.01, 0.2, 0.9])
    allowed[random.integers(290)] = True
    bias = {int(id_): float(random.integers(-50, 50)) for id_ in random.integers(0, 300, 5)}
    chain = Chain(SamplingParams(**options, logit_bias=bias), seed=seed)
    tokens = random.integers(0, 300, 20).tolist()
    for _ in range(5):
        assert chain.sample(logits, tokens, allowed=allowed) in np.flatnonzero(allowed)


# Ids that the tokenizer does not know, as models have them whose vocabulary is padded to a round
# size. Compiled models never choose them.
N_PADDED = tokenizer().n_vocab + 32
NO_PADDING = dict.fromkeys(range(tokenizer().n_vocab, N_PADDED), -math.inf)


def engine_of(**sizes: Any) -> Engine:
    words = tokenizer()
    sizes = {"n_vocab": N_PADDED, "max_context": 256, "n_blocks": 128} | sizes
    return Engine(FakeModel(**sizes), words)


def generate(engine: Engine, **options: Any) -> Result:
    return engine.generate("hello world", **options)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "temperature": 1.5}])
def test_answers_follow_their_grammars_alone_and_batched_and_preempted(
    options: dict[str, Any],
) -> None:
    asked = [
        {"max_tokens": 40, "logit_bias": NO_PADDING},
        {"grammar": JSON_GBNF, "max_tokens": 60},
        {"json_schema": PERSON},
        {"regex": "[a-z]{3} [0-9]{40}"},
    ]
    alone = [generate(engine_of(), **options, **each) for each in asked]
    assert is_person(json.loads(alone[2].text))
    assert re.fullmatch("[a-z]{3} [0-9]{40}", alone[3].text)
    assert [each.finish_reason for each in alone[2:]] == ["stop", "stop"]
    engine = engine_of(n_blocks=30, max_batch=6)
    # Together with long ones, so that the pool is too small and some have to yield.
    filler = [
        engine.add_request([1] * 20, seed=0, max_tokens=90, ignore_eos=True, logit_bias=NO_PADDING)
        for _ in range(2)
    ]
    requests = [engine.add_request("hello world", **options, **each) for each in asked]
    results: dict[int, Result] = {}
    preempted: set[int] = set()
    while engine.has_work:
        results |= {e.request.id: e.result for e in engine.step() if e.result is not None}
        states = {id_: each.sequence.state for id_, each in engine._live.items()}
        preempted |= {id_ for id_, state in states.items() if state is State.PREEMPTED}
    assert len(results) == len(filler) + len(asked)
    assert [results[each.id].ids for each in requests] == [each.ids for each in alone]
    assert preempted & {each.id for each in requests[2:]}


def test_min_tokens_and_ignore_eos_keep_the_end_away_until_nothing_else_is_left() -> None:
    engine = engine_of()
    ends = dict.fromkeys(tokenizer().eog_ids, 1000.0)
    options: dict[str, Any] = {"regex": "[a-z]{0,6}", "temperature": 0, "logit_bias": ends}
    assert generate(engine, **options).text == ""
    longer = generate(engine, **options, min_tokens=3)
    assert len(longer.ids) == 4
    assert longer.ids[-1] in tokenizer().eog_ids
    whole = generate(engine, **options, ignore_eos=True)
    assert re.fullmatch("[a-z]{6}", whole.text)
    assert whole.finish_reason == "stop"
    assert generate(engine, **options, min_tokens=50).text == whole.text


def test_max_tokens_and_stop_strings_end_an_answer_before_its_grammar_does() -> None:
    engine = engine_of()
    cut = generate(engine, regex="[a-z]{60}", temperature=0, max_tokens=3)
    assert (cut.finish_reason, len(cut.ids)) == ("length", 3)
    stopped = generate(engine, regex="[a-z]{10}-[a-z]+", temperature=0, stop="-")
    assert (stopped.finish_reason, stopped.stop, len(stopped.text)) == ("stop", "-", 10)


def test_greedy_with_a_grammar_takes_the_likeliest_that_is_allowed() -> None:
    engine = engine_of()
    free = generate(engine, temperature=0, max_tokens=1, logprobs=tokenizer().n_vocab)
    assert free.logprobs is not None
    digits = set(tokenizer().encode("0123456789"))
    best = next(id_ for id_, _ in free.logprobs[0].top if id_ in digits)
    bound = generate(engine, temperature=0, regex="[0-9]", logprobs=2)
    assert bound.ids == [best]
    # Log probabilities stay those of the model, forbidden tokens included.
    assert bound.logprobs is not None
    assert bound.logprobs[0].top == free.logprobs[0].top[:2]
    assert bound.logprobs[0].logprob == dict(free.logprobs[0].top)[best]


def test_a_dead_end_fails_that_request_only() -> None:
    engine = engine_of()
    letter = tokenizer().encode("q")[0]
    requests = [
        engine.add_request("hello", temperature=0, **each)
        for each in (
            {"regex": "aq", "logit_bias": {letter: -math.inf}},
            {"regex": "aq"},
            {"logit_bias": dict.fromkeys(range(engine.model.n_vocab), -math.inf)},
        )
    ]
    results: dict[int, Result] = {}
    while engine.has_work:
        results |= {e.request.id: e.result for e in engine.step() if e.result is not None}
    forbidden, fine, nothing = (results[each.id] for each in requests)
    assert (forbidden.finish_reason, forbidden.text) == ("error", "a")
    n = len(forbidden.prompt_ids) + 1
    assert forbidden.error == (
        f"no token can follow the {n} there are: of those the grammar allows, the other options"
        " forbid all"
    )
    assert (fine.finish_reason, fine.text) == ("stop", "aq")
    assert nothing.finish_reason == "error"
    assert nothing.error is not None
    assert nothing.error.endswith("logit_bias, min_tokens and ignore_eos forbid all")


def test_a_vocabulary_that_cannot_spell_the_answer_is_a_dead_end() -> None:
    words = tokenizer_files.build(tokenizer_files.spm({"a": -1.0, "b": -2.0}))

    class Abridged(Tokenizer):
        """One without bytes to fall back on."""

        def token_bytes(self, token_id: int) -> bytes:
            raw = super().token_bytes(token_id)
            return raw if raw in b"ab" else b""

    abridged = Abridged(words._model, words.facts)
    result = Engine(FakeModel(n_vocab=words.n_vocab), abridged).generate([1], regex="a(c|d)")
    assert result.finish_reason == "error"
    assert result.error is not None
    assert result.error.startswith("no token can follow the 2 there are: the grammar's dead end")


@pytest.fixture(params=["smollm2_spec", "gemma3_spec"])
def real_words(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_files.loaded(request.getfixturevalue(request.param))


@pytest.mark.model
@pytest.mark.slow
def test_random_walks_with_real_vocabularies(real_words: Tokenizer) -> None:
    made = Grammars(real_words)
    for seed in range(20):
        state = made.start(SamplingParams(json_schema=PERSON))
        assert state is not None
        spelled = walk(state, real_words, seed)
        assert is_person(json.loads(spelled.decode()))
        state = made.start(SamplingParams(grammar=JSON_GBNF))
        assert state is not None
        for id_ in real_words.encode('{"a": [1, "b"]}', add_bos=False):
            assert state.allowed[id_]
            assert state.accept(id_)
        assert state.is_complete
