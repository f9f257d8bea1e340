"""`xpuc run` on an engine whose model is a few hash functions."""

import inspect
import math
import re
import signal
from pathlib import Path

import cli_runs
import numpy as np
import pytest
from cli_runs import invoke, write_manifest
from fake_model import FakeCodec, FakeModel

from xpuc.cli import engine_options
from xpuc.cli.quantities import n_bytes
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.policies import POLICIES
from xpuc.runtime.prefix_store import STORE_BYTES
from xpuc.runtime.speculation import Speculation

INTERRUPTED = 130


def run(artifact, *args, **more):
    return invoke("run", artifact, "--temp", 0, "-n", 6, *args, **more)


def test_the_text_goes_to_stdout_and_the_rates_to_stderr(artifact, engine):
    done = run(artifact, "--raw", "-p", "hello")
    assert done.code == 0
    assert done.out == engine.generate("hello", temperature=0, max_tokens=6).text + "\n"
    assert done.err.startswith("prompt 5 tokens, ")
    assert done.err.endswith(("; length\n", "; stop\n"))
    assert len(done.err.splitlines()) == 1


def test_one_object_with_the_keys_that_are_promised(artifact, engine):
    done = run(artifact, "--raw", "-p", "hello", "--json")
    result = engine.generate("hello", temperature=0, max_tokens=6)
    assert not done.err
    assert done.json["prompt_ids"] == result.prompt_ids == engine.tokenizer.encode("hello")
    assert done.json["ids"] == result.ids
    assert done.json["text"] == result.text
    assert done.json["finish_reason"] == result.finish_reason
    assert done.json["timings"]["n_prompt"] == 5
    assert done.json["timings"]["n_generated"] == len(result.ids)
    rates = {"first_token_ms", "prompt_ms", "decode_ms", "prompt_tokens_per_s", "tokens_per_s"}
    assert rates <= done.json["timings"].keys()


def test_loads_for_one_sequence_and_warms_the_smallest_bucket(artifact, engine):
    run(artifact, "-p", "hello", "-c", 32, "-t", 3)
    assert engine.asked == [
        {
            "threads": 3, "ctx": 32, "n_sequences": 1, "warm_rows": 1,
            "store": None, "policy": "fcfs", "chunk_budget_ms": 150.0, "step_log": None,
            "find_bad_layer": False,
            "speculation": Speculation(draft_max=0), "pipeline": True, "graphs": True,
        }
    ]  # fmt: skip


def test_the_options_of_the_engine_are_those_of_load(artifact, engine):
    run(
        artifact, "-p", "hello", "--store", "kept", "--store-bytes", "1.5G", "--policy", "lpm",
        "--chunk-budget-ms", "inf", "--step-log", "steps.jsonl", "--draft-max", 7,
        "--completions", 9, "--no-pipeline", "--no-graphs", "--find-bad-layer",
    )  # fmt: skip
    (asked,) = engine.asked
    assert asked == {
        "threads": None, "ctx": None, "n_sequences": 4, "warm_rows": 1, "store": Path("kept"),
        "store_bytes": 3 << 29, "policy": "lpm", "chunk_budget_ms": math.inf,
        "step_log": Path("steps.jsonl"), "speculation": Speculation(draft_max=7),
        "pipeline": False, "graphs": False, "find_bad_layer": True,
    }  # fmt: skip
    assert asked.keys() <= inspect.signature(load).parameters.keys()
    assert asked["n_sequences"] == cli_runs.manifest().max_batch, "not more than run side by side"


def test_the_names_and_defaults_that_help_tells_are_the_engines():
    told = invoke("run", "--help").out
    assert tuple(POLICIES) == engine_options.POLICIES
    assert n_bytes("20G") == STORE_BYTES
    assert "Default: 20G" in " ".join(told.split())


def test_several_answers_are_those_of_their_seeds(artifact, engine):
    made = engine.generate("hello", n=3, seed=5, max_tokens=6)
    answers = [made, *made.others]
    args = ("--raw", "-p", "hello", "-n", 6, "-s", 5, "--completions", 3)
    done = invoke("run", artifact, *args)
    assert done.out == "---\n".join(each.text + "\n" for each in answers)
    assert len(done.err.splitlines()) == 3
    found = invoke("run", artifact, *args, "--json").json
    assert [found["ids"], *(each["ids"] for each in found["others"])] == [a.ids for a in answers]
    assert [each["seed"] for each in found["others"]] == [6, 7]


def test_drafts_are_counted(artifact, monkeypatch):
    def load(path, **options):
        return Engine(FakeModel(), FakeCodec(), speculation=options["speculation"])

    monkeypatch.setattr("xpuc.runtime.engine.load", load)
    args = ("--raw", "-p", "hello", "-n", 20, "--temp", 0, "-l", "3+60")
    plain = invoke("run", artifact, *args)
    drafted = invoke("run", artifact, *args, "--draft-max", 3)
    assert drafted.out == plain.out
    assert "draft" not in plain.err
    assert re.search(r"; \d+ of \d+ draft tokens accepted; length", drafted.err)
    timings = invoke("run", artifact, *args, "--draft-max", 3, "--json").json["timings"]
    assert 0 < timings["n_accepted"] <= timings["n_drafted"]


@pytest.mark.parametrize(
    ("told", "args", "prompt"),
    [
        ("gguf", [], "user hi."),
        ("gguf", ["--raw"], "hi"),
        ("gguf", ["--system", "be terse"], "system be terse.user hi."),
        ("builtin gemma", [], "hi"),
        ("builtin gemma", ["--chat"], "user hi."),
        ("builtin gemma", ["--system", "no"], "system no.user hi."),
        (None, [], "hi"),
    ],
)
def test_chat_is_for_models_that_bring_a_template(tmp_path, engine, told, args, prompt):
    made = write_manifest(tmp_path / "m.xpuc", tokenizer={"chat_template": told})
    done = run(made, "-p", "hi", "--json", *args)
    assert done.json["prompt_ids"] == engine.tokenizer.encode(prompt)


@pytest.mark.parametrize(
    ("told", "args", "message"),
    [
        (None, ["--chat"], "the model has no chat template"),
        (
            "gguf",
            ["--raw", "--system", "x"],
            "--system: goes into a chat template, and --raw uses none",
        ),
    ],
)
def test_a_chat_that_cannot_be(tmp_path, engine, told, args, message):
    made = write_manifest(tmp_path / "m.xpuc", tokenizer={"chat_template": told})
    done = run(made, "-p", "hi", *args)
    assert message in done.err.splitlines()[0]
    assert done.code == 2


def test_the_prompt_comes_from_a_file_or_stdin_less_one_newline(artifact, engine, tmp_path):
    (tmp_path / "p.txt").write_text("hello\n")
    given = run(artifact, "--raw", "-p", "hello", "--json").json["prompt_ids"]
    assert run(artifact, "--raw", "-f", tmp_path / "p.txt", "--json").json["prompt_ids"] == given
    assert run(artifact, "--raw", "--json", stdin="hello\n").json["prompt_ids"] == given
    assert (
        run(artifact, "--raw", "-f", "-", "--json", stdin="hello\r\n").json["prompt_ids"] == given
    )


def test_a_seed_repeats_the_answer(artifact, engine):
    first = invoke("run", artifact, "-p", "hi", "-n", 8, "--json", "--temp", 2).json
    again = invoke(
        "run", artifact, "-p", "hi", "-n", 8, "--json", "--temp", 2, "-s", first["seed"]
    ).json
    other = invoke("run", artifact, "-p", "hi", "-n", 8, "--json", "--temp", 2, "-s", 7).json
    assert again["ids"] == first["ids"]
    assert other["ids"] != first["ids"]


def test_every_option_reaches_the_sampler(artifact, engine, monkeypatch):
    asked = []
    add = engine.add_request
    monkeypatch.setattr(
        engine, "add_request", lambda p, params: asked.append(params) or add(p, params)
    )
    invoke(
        "run", artifact, "-p", "hi", "-n", 3, "--completions", 2, "--temp", 0.5,
        "--top-k", 3, "--top-p", 0.6, "--min-p", 0.1, "--typical", 0.9, "--top-nsigma", 2,
        "--xtc-probability", 0.3, "--xtc-threshold", 0.2,
        "--repeat-penalty", 1.2, "--repeat-last-n", 9, "--presence-penalty", 0.4,
        "--frequency-penalty", 0.7, "--dry-multiplier", 0.8, "--dry-base", 1.5,
        "--dry-allowed-length", 4, "--dry-penalty-last-n", 20, "--dry-sequence-breaker", "none",
        "--samplers", "top_k;temperature", "-l", "5+1.5", "-l", "6-inf", "-s", 4, "--ignore-eos",
        "--stop", "one", "--stop", "two", "--dynatemp-range", 0.25, "--dynatemp-exp", 2,
    )  # fmt: skip
    (params,) = asked
    shown = {name: getattr(params, name) for name in type(params).__dataclass_fields__}
    assert shown == {
        "max_tokens": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.6, "min_p": 0.1,
        "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.3, "xtc_threshold": 0.2,
        "repeat_penalty": 1.2, "penalty_last_n": 9, "presence_penalty": 0.4,
        "frequency_penalty": 0.7, "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 4,
        "dry_last_n": 20, "dry_breakers": (), "samplers": "top_k;temperature",
        "logit_bias": {5: 1.5, 6: -np.inf}, "seed": 4, "ignore_eos": True, "stop": ("one", "two"),
        "min_keep": 0, "stop_ids": (), "min_tokens": 0, "logprobs": None, "draft_max": None, "n": 2,
        "dynatemp_range": 0.25, "dynatemp_exponent": 2.0,
        "json_schema": None, "json_object": False, "regex": None, "grammar": None,
    }  # fmt: skip


def test_an_answer_follows_a_regex_or_a_grammar(artifact, engine, tmp_path):
    pytest.importorskip("llguidance")
    (tmp_path / "g.gbnf").write_text('root ::= "abc"+ "."\n')
    made = run(artifact, "-p", "hi", "--regex", "(abc)+[.]", "-l", "28+30")
    assert (made.out, made.code) == ("abc.\n", 0)
    given = run(artifact, "-p", "hi", "--grammar", tmp_path / "g.gbnf", "-l", "28+30")
    assert given.out == made.out
    piped = run(artifact, "-p", "hi", "-l", "28+30", "--grammar", "-", stdin='start: "abc."')
    assert piped.out == made.out


def test_a_schema_is_read_from_its_file(artifact, engine, tmp_path):
    pytest.importorskip("llguidance")
    (tmp_path / "s.json").write_text('{"type": "stirng"}')
    done = run(artifact, "-p", "hi", "--json-schema", tmp_path / "s.json")
    assert done.code == 2
    assert done.err.startswith("error: --json-schema does not compile: Invalid type: stirng\n")
    both = run(artifact, "-p", "hi", "--json-schema", tmp_path / "s.json", "--regex", "a")
    assert "--json-schema and --regex exclude each other" in both.err
    twice = run(artifact, "--json-schema", "-", stdin="{}")
    assert "stdin is asked for twice" in twice.err


def _interrupt_at(engine, monkeypatch, *calls):
    model_run = engine.model.run

    def run(batch, *, tail):
        if len(engine.model.calls) in calls:
            signal.raise_signal(signal.SIGINT)
        return model_run(batch, tail=tail)

    monkeypatch.setattr(engine.model, "run", run)


def test_ctrl_c_ends_the_answer_and_keeps_what_was_printed(artifact, engine, monkeypatch):
    whole = run(artifact, "--raw", "-p", "hello", "--ignore-eos", "--json").json
    start = len(engine.model.calls)
    handler = signal.getsignal(signal.SIGINT)
    _interrupt_at(engine, monkeypatch, start + 2)
    done = run(artifact, "--raw", "-p", "hello", "--ignore-eos")
    assert done.code == INTERRUPTED
    assert done.out == engine.tokenizer.decode(whole["ids"][:3]) + "\n"
    assert "; answer 3 tokens, " in done.err
    assert done.err.endswith("; cancelled\n")
    assert engine.kv.n_used == 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_does_not_wait(artifact, engine, monkeypatch):
    def run_twice(batch, *, tail):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine.model, "run", run_twice)
    done = run(artifact, "-p", "hello")
    assert (done.code, done.err) == (INTERRUPTED, "interrupted\n")


def test_a_step_that_fails_is_a_bug_in_one_line(artifact, engine):
    engine.model.fails_at = {len(engine.model.calls) + 1}
    done = run(artifact, "--raw", "-p", "hello")
    assert done.code == 1
    assert "bug: RuntimeError: the step failed: kernel launch failed" in done.err
    assert "Traceback" not in done.err


def test_an_answer_that_nothing_can_follow_takes_two_lines(artifact, engine):
    pytest.importorskip("llguidance")
    done = run(artifact, "--raw", "-p", "hi", "--regex", "[.]", "-l", "27-inf")
    assert done.code == 2
    assert done.err.splitlines()[-2:] == [
        "error: no token can follow the 2 there are: of those the grammar allows, the other"
        " options forbid all",
        "hint: let these options leave a token, or let the grammar go on or end there",
    ]
    banned = [f"{id_}-inf" for id_ in range(97)]
    done = run(artifact, "--raw", "-p", "hi", *(each for b in banned for each in ("-l", b)))
    assert done.err.splitlines()[-2:] == [
        "error: no token can follow the 2 there are: logit_bias, min_tokens and ignore_eos forbid"
        " all",
        "hint: let these options leave a token",
    ]


def test_logits_that_are_no_numbers_take_two_lines(artifact, engine):
    engine.model.nan_tokens = set(range(97))
    done = run(artifact, "--raw", "-p", "hello")
    assert done.code == 2
    error, hint = done.err.splitlines()[-2:]
    assert error == "error: the logits after 5 tokens are unfit: none is the largest"
    assert hint.startswith("hint: compare the artifact's files (xpuc inspect --verify)")


def test_what_the_engine_refuses_of_an_option_names_it_as_typed(artifact, engine):
    for typed, message in (
        (("-l", "97+1"), "--logit-bias: token 97 at place 0 is not in the vocabulary"),
        (("--completions", 1000), "--completions is 1000; at most 512 can wait"),
    ):
        done = run(artifact, "--raw", "-p", "hello", *typed)
        assert done.code == 2
        assert done.err.splitlines()[0] == f"error: {message}"


def test_a_prompt_that_does_not_fit(artifact, engine):
    done = run(artifact, "--raw", "-p", "a" * 96)
    assert done.code == 2
    assert "the prompt has 96 tokens" in done.err
    assert "--ctx" in done.err.splitlines()[1]
