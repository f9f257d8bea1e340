"""`xpuc score`: the promised JSON, ids from a file or a text."""

import json
import math

import pytest
from cli_runs import invoke

IDS = [3, 14, 15, 9, 26, 5]


def test_teacher_forced_json(artifact, engine, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    done = invoke("score", artifact, "--ids", tmp_path / "ids.json", "--top", 2, "--json")
    assert set(done.json) == {"positions", "nll", "perplexity"}
    positions = done.json["positions"]
    assert [each["id"] for each in positions] == IDS
    assert all(set(each) == {"id", "logprob", "top"} for each in positions)
    assert positions[0] == {"id": IDS[0], "logprob": None, "top": []}
    expected = engine.score(IDS, 2)
    assert [each["logprob"] for each in positions] == [each.logprob for each in expected.positions]
    assert all(len(each["top"]) == 2 for each in positions[1:])
    assert positions[1]["top"] == [list(pair) for pair in expected.positions[1].top]
    assert done.json["nll"] == pytest.approx(-sum(each["logprob"] for each in positions[1:]) / 5)
    assert done.json["perplexity"] == pytest.approx(math.exp(done.json["nll"]))


def test_what_tokenize_prints_can_be_scored(artifact, engine):
    plain = invoke("score", artifact, "--ids", "-", "--json", stdin=json.dumps(IDS)).json
    named = invoke("score", artifact, "--ids", "-", "--json", stdin=json.dumps({"ids": IDS})).json
    assert plain == named


def test_a_text_is_scored_as_it_is(artifact, engine, tmp_path):
    (tmp_path / "t.txt").write_text("hello there")
    done = invoke("score", artifact, "-f", tmp_path / "t.txt", "--json")
    assert [each["id"] for each in done.json["positions"]] == engine.tokenizer.encode("hello there")


def test_for_people(artifact, engine):
    done = invoke("score", artifact, "--ids", "-", "--top", 1, stdin=json.dumps(IDS))
    lines = done.out.splitlines()
    assert len(lines) == len(IDS) + 1
    assert lines[-1].startswith("6 tokens, mean nll ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "stdin: not JSON"),
        ("[" * 100_000, "stdin: not JSON"),
        ('{"tokens": [1]}', "stdin: holds no list of token ids"),
        ('[1, "2"]', "stdin: holds no list of token ids"),
        ("[1, true]", "stdin: holds no list of token ids"),
        ("[1, 97]", "97"),
        ("[]", "the text is empty"),
    ],
    ids=lambda text: text[:12],
)
def test_ids_that_are_none(artifact, engine, text, message):
    done = invoke("score", artifact, "--ids", "-", stdin=text)
    assert message in done.err.splitlines()[0]
    assert len(done.err.splitlines()) == 2
    assert done.code == 2


def test_perplexity_in_windows(artifact, engine):
    ids = [i * 7 % 97 for i in range(40)]
    done = invoke(
        "score", artifact, "--ids", "-", "--window", 16, "--json", stdin=json.dumps(ids)
    ).json
    assert set(done) == {"windows", "scored", "nll", "perplexity", "error"}
    assert len(done["windows"]) == 2
    assert done["scored"] == 14
    assert done["perplexity"] == pytest.approx(math.exp(done["nll"]))
    one = invoke(
        "score", artifact, "--ids", "-", "--window", 16, "--windows", 1, stdin=json.dumps(ids)
    )
    assert one.out.startswith("1 window of 16 tokens, 7 scored, perplexity ")
    short = invoke("score", artifact, "--ids", "-", "--window", 64, stdin=json.dumps(ids))
    assert short.code == 2
