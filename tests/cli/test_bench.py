"""`xpuc bench`: llama-bench's names, what a token reads, rounds, and a peer in another process."""

import json
import sys
from pathlib import Path

import pytest
from cli_runs import invoke, manifest
from fake_model import PIPELINED, FakeModel

from xpuc.artifact import KvLayout, Plane
from xpuc.bench import Case, Profile, Row, Session, cases, peer
from xpuc.bench.cases import random_ids
from xpuc.bench.ours import Ours, kv_bytes, streamed_weights
from xpuc.bench.profile import REST, KernelRow
from xpuc.bench.roofs import RoofLoops, Roofs
from xpuc.bench.session import spread
from xpuc.cli import sources
from xpuc.codegen.options import Options
from xpuc.errors import FileError, RequestError, UnsupportedError

# Answers like peer_worker.py, without llama.cpp: slower with flash attention than without.
STUB = """
import json, sys
settings = json.loads(sys.argv[1])
print(json.dumps({"description": f"stub with {settings['threads']} threads"}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if case["depth"] == 13:
        sys.exit(3)
    if case["depth"] == 14:
        print(json.dumps({"error": "no such depth"}), flush=True)
    seconds = (0.002 if case["flash"] else 0.001) * case["n_tokens"] * case["batch"]
    print(json.dumps({"seconds": seconds}), flush=True)
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    monkeypatch.setattr(peer.peer_worker, "__file__", str(script))
    monkeypatch.setattr(peer, "find_package", lambda python: "llama_cpp")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("xpuc.bench.session._PAUSE_S", 0)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("pp", 512), "pp512"),
        (Case("tg", 128), "tg128"),
        (Case("tg", 128, 1024), "tg128 @ d1024"),
        (Case("tg", 128, 0, 8), "tg128 b8"),
        (Case("tg", 128, 1024, 8), "tg128 b8 @ d1024"),
    ],
)
def test_names(case, name):
    assert case.name == name


def test_every_combination_and_none_of_length_nothing():
    assert [case.name for case in cases([8, 0], [4], [0, 6], [1, 2])] == [
        "pp8", "pp8 @ d6", "tg4", "tg4 b2", "tg4 @ d6", "tg4 b2 @ d6",
    ]  # fmt: skip
    assert cases([0], [0], [0], [1]) == []


def test_ids_are_valid_and_repeat():
    assert random_ids(97, 50, 0) == random_ids(97, 50, 0) != random_ids(97, 50, 1)
    assert all(0 <= each < 97 for each in random_ids(97, 500, 3))


def _ours(*wanted):
    return Ours(FakeModel(), manifest(), wanted)


def test_a_prompt_runs_in_chunks_after_its_depth():
    ours = _ours(Case("pp", 20, 10))
    ours.run(Case("pp", 20, 10))
    assert ours.model.calls == [
        (kind, n, "greedy")
        for kind, n in (("prefill", 10), ("decode", 1), ("prefill", 16), ("prefill", 4))
    ]


def test_generation_queues_steps_ahead_where_that_is_on():
    ours = Ours(FakeModel(modes=PIPELINED), manifest(), [Case("tg", 6, 4, 2)])
    plain = Ours(FakeModel(), manifest(), [Case("tg", 6, 4, 2)])
    for each in (ours, plain):
        each.run(Case("tg", 6, 4, 2))
    assert ours.model.calls == plain.model.calls
    assert (ours.model.kv[0].token == plain.model.kv[0].token).all()
    assert (ours.model.n_queued, plain.model.n_queued) == (2, 1)


def test_generation_runs_a_step_a_token():
    ours = _ours(Case("tg", 3, 5, 2))
    ours.run(Case("tg", 3, 5, 2))
    depth = [("prefill", 5, "greedy")] * 2
    assert ours.model.calls == depth + [("cols", 2, "greedy")] * 4


def test_a_depth_is_filled_once():
    wanted = (Case("tg", 3, 5), Case("pp", 8, 5), Case("tg", 3))
    ours = _ours(*wanted)
    for case in wanted * 2:
        ours.run(case)
    # FakeModel asserts that all K/V a row reads was written at its position.
    assert [call for call in ours.model.calls if call == ("prefill", 5, "greedy")] == [
        ("prefill", 5, "greedy")
    ]


def test_a_warm_up_takes_the_largest_chunk():
    ours = _ours(Case("pp", 40))
    ours.warm_up()
    assert ours.model.calls == [("prefill", 16, "greedy"), ("decode", 1, "greedy")]


def test_a_batch_the_artifact_was_not_compiled_for():
    with pytest.raises(
        RequestError, match="-b 5: the artifact was compiled for batches of up to 4"
    ):
        _ours(Case("tg", 3, 0, 5))


def test_an_untied_embedding_table_is_not_read():
    untied = manifest().planes
    assert streamed_weights(untied) == 100 * 2 + 3000
    assert streamed_weights(untied[:2]) == 1000 + 100 * 2
    assert streamed_weights([Plane("x", "int16", 10), Plane("y", "float32", 10)]) == 60


def test_a_window_bounds_what_is_read_of_the_context():
    per_layer = 2 * 2 * 16 * 2
    assert kv_bytes(manifest(), 5) == 2 * 5 * per_layer
    assert kv_bytes(manifest(), 20) == (20 + 8) * per_layer
    q8_0 = KvLayout("q8_0", 16, 16, 4, ((2, 64, 0), (2, 64, 8)))
    assert kv_bytes(manifest(kv=q8_0), 20) == (20 + 8) * 2 * 2 * 2 * 34


def test_bytes_of_a_token():
    weights, per_layer = 3200, 2 * 2 * 16 * 2
    ours = _ours(Case("tg", 4, 0, 4), Case("pp", 32))
    assert ours.bytes_per_token(Case("tg", 3)) == weights + 2 * 2 * per_layer
    assert ours.bytes_per_token(Case("tg", 3, 0, 4)) == weights / 4 + 2 * 2 * per_layer
    # 32 tokens are two chunks: the weights are read twice, and so is half of the context.
    context = (16.5 + 8) * per_layer
    assert ours.bytes_per_token(Case("pp", 32)) == pytest.approx(2 * (weights + context) / 32)


def test_spread():
    assert spread([90, 100, 120]) == pytest.approx(0.3)


def test_rows_are_medians_and_ratios_of_the_rounds(stub, monkeypatch):
    case = Case("tg", 10)
    taken = iter([0.005, 0.01, 0.0025])
    ours = _ours(case)
    monkeypatch.setattr(ours, "run", lambda case: next(taken))
    other = peer.Peer("m.gguf", 2, [case])
    try:
        seen = []
        (row,) = Session([case], ours, 2, other).run(3, lambda *at: seen.append(at))
    finally:
        other.close()
    assert seen == [(0, "tg10"), (1, "tg10"), (2, "tg10")]
    assert row.tok_s == pytest.approx(2000)
    assert row.spread == pytest.approx((4000 - 1000) / 2000)
    assert row.peer_tok_s == pytest.approx(1000)
    assert row.peer_flash_attention is False
    assert row.ratio == pytest.approx(2.0)
    assert row.peer == "stub with 2 threads"
    assert row.gb_s == pytest.approx(row.bytes_per_token * 2000 / 1e9)
    assert row.pct_bandwidth == pytest.approx(100 * row.gb_s / row.bandwidth_gb_s)


def test_without_a_peer_its_columns_are_empty():
    case = Case("tg", 2)
    (row,) = Session([case], _ours(case), 1).run(2, lambda *at: None)
    assert row.tok_s > 0
    assert (row.peer, row.peer_tok_s, row.ratio) == (None, None, None)


@pytest.mark.parametrize(
    ("depth", "error", "message"),
    [(13, FileError, "llama.cpp ended"), (14, UnsupportedError, "llama.cpp: no such depth")],
)
def test_a_peer_that_fails_says_so(stub, depth, error, message):
    case = Case("tg", 1, depth)
    other = peer.Peer("m.gguf", 1, [case])
    try:
        for _ in range(2 if error is FileError else 1):
            with pytest.raises(error, match=message):
                other.run(case, flash=True)
    finally:
        other.close()


def test_no_package_of_the_peer_names_one(monkeypatch):
    monkeypatch.setattr(peer, "_SEARCH", "print('')")
    with pytest.raises(RequestError) as caught:
        peer.find_package(sys.executable)
    assert "xpuc[peer]" in caught.value.hint
    with pytest.raises(RequestError, match="does not run"):
        peer.find_package("/no/such/python")


@pytest.fixture
def artifact(artifact, monkeypatch):
    monkeypatch.setattr(
        Ours,
        "load",
        classmethod(
            lambda cls, path, threads, wanted, **modes: cls(FakeModel(), manifest(), wanted)
        ),
    )
    return artifact


def test_json_is_a_list_of_rows(artifact):
    done = invoke("bench", artifact, "-p", 8, "-n", "2,3", "-t", 1, "-r", 2, "--json")
    assert done.code == 0
    assert [row["test"] for row in done.json] == ["pp8", "tg2", "tg3"]
    assert all(row.keys() == Row.__dataclass_fields__.keys() for row in done.json)
    assert all(row["rounds"] == 2 and row["threads"] == 1 for row in done.json)
    assert not done.err


def test_for_people_a_line_a_test(artifact):
    lines = invoke("bench", artifact, "-p", 8, "-n", 2, "-t", 1, "-r", 1).out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["test", "pp8", "tg2"]
    assert any(line.startswith("medians of 1 round, 1 thread; memory is read at") for line in lines)


@pytest.fixture
def profiled(artifact, monkeypatch):
    """Every step is one kernel and a rest; there is a peak of byte products."""
    made = Profile(
        "1 row up to position 1",
        250.0,
        (
            KernelRow("linear_q4_0_8x64_r1", 2, 200.0, 80.0, 1_500_000, 10, "memory", 150.0, 75.0),
            KernelRow(REST, 0, 50.0, 20.0, 0, 0, None, 0.0, None),
        ),
    )
    monkeypatch.setattr(Session, "_profile", lambda *args: made)
    monkeypatch.setattr(Ours, "operations_per_token", lambda self, case: 1000.0)
    monkeypatch.setattr(RoofLoops, "measure", lambda self, repeat: Roofs(1e9, 1e9))
    return artifact


def test_kernels_of_a_step_have_a_line_each(profiled):
    lines = invoke("bench", profiled, "-p", 8, "-n", 2, "-t", 1, "-r", 1, "--profile").out
    assert lines.count("1 row up to position 1") == 2
    table = lines.partition("tg2: ")[2].splitlines()[1:5]
    assert [" ".join(line.split()) for line in table] == [
        "kernel launches us of step MB of limit",
        "linear_q4_0_8x64_r1 2 200.0 80.0 % 1.50 75 % memory",
        "between kernels - 50.0 20.0 % 0.00 -",
        "step 2 250.0 100.0 % 1.50",
    ]


def test_kernels_of_a_step_as_json(profiled):
    args = ("bench", profiled, "-p", 0, "-n", 2, "-t", 1, "-r", 1, "--json")
    (row,) = invoke(*args, "--profile").json
    assert row["profile"]["step_us"] == sum(each["us"] for each in row["profile"]["rows"])
    assert row["profile"]["rows"][0]["kernel"] == "linear_q4_0_8x64_r1"
    assert invoke(*args).json[0]["profile"] is None


def test_steps_of_many_rows_have_a_part_of_the_peak(profiled):
    args = ("bench", profiled, "-p", 8, "-n", 2, "-t", 1, "-r", 1)
    lines = invoke(*args).out.splitlines()
    assert lines[0].endswith("of bandwidth  of int8 peak")
    assert lines[1].endswith(" %")
    assert lines[2].endswith("  -")
    assert any(line.endswith(" Gop/s") for line in lines[3:])
    prompt, alone = invoke(*args, "--json").json
    assert prompt["int8_gop_s"] == pytest.approx(prompt["tok_s"] * 1000 / 1e9)
    assert alone["pct_int8_peak"] is None


def test_the_peer_gets_its_column_and_its_name(artifact, stub, tmp_path, monkeypatch):
    monkeypatch.setattr("xpuc.cli.bench._check_same", lambda *paths: None)
    args = (
        "bench",
        artifact,
        "-p",
        0,
        "-n",
        2,
        "-t",
        2,
        "-r",
        1,
        "--vs",
        "llama.cpp",
        "--model",
        tmp_path,
    )
    row = invoke(*args, "--json").json[0]
    assert row["peer"] == "stub with 2 threads"
    assert row["ratio"] == pytest.approx(row["tok_s"] / row["peer_tok_s"])
    assert "peer: stub with 2 threads" in invoke(*args).out


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where models are compiled into; a command that is refused makes none."""
    monkeypatch.setenv("XPUC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_another_checkpoint_is_not_compared_with(artifact, checkpoint, cache, tmp_path):
    from gguf_files import gguf_bytes

    (tmp_path / "other.gguf").write_bytes(gguf_bytes())
    for model, what in (
        (artifact, f"what {artifact} was compiled from (tiny.gguf)"),
        (checkpoint, f"the model of {checkpoint}"),
    ):
        done = invoke("bench", model, "--vs", "llama.cpp", "--model", tmp_path / "other.gguf")
        assert done.err.splitlines()[0] == f"error: {tmp_path / 'other.gguf'}: is not {what}"
        assert done.code == 2
    assert not cache.exists()


def test_a_batch_that_a_model_is_not_compiled_for_is_refused_before_it_is(checkpoint, cache):
    assert Options().max_batch == sources.DEFAULT_BATCH
    done = invoke("bench", checkpoint, "-b", "1,9")
    assert done.err == (
        "error: -b 9: a MODEL is compiled for batches of up to 8\n"
        "hint: give the artifact that xpuc compile --max-batch 9 makes of it\n"
    )
    assert not cache.exists()


@pytest.mark.parametrize(
    ("search", "python", "message"),
    [
        ("print('')", sys.executable, "--vs llama.cpp: no package of it is installed"),
        ("", "/no/such/python", "--peer-python /no/such/python: does not run"),
    ],
)
def test_a_peer_that_is_not_there_is_refused_before_the_model_is_compiled(
    checkpoint, cache, monkeypatch, search, python, message
):
    monkeypatch.setattr(peer, "_SEARCH", search)
    done = invoke("bench", checkpoint, "--vs", "llama.cpp", "--peer-python", python)
    assert (done.code, done.out) == (2, "")
    error, _ = done.err.splitlines()
    assert error == f"error: {message}"
    assert not cache.exists()


def test_a_checkpoint_that_the_peer_cannot_read_is_refused_before_it_is_compiled(
    checkpoint, cache, stub
):
    Path(peer.peer_worker.__file__).write_text(
        "import json; print(json.dumps({'error': 'cannot load the model'}))"
    )
    done = invoke("bench", checkpoint, "--vs", "llama.cpp")
    assert done.err.splitlines()[0] == "error: llama.cpp: cannot load the model"
    assert done.code == 2
    assert not cache.exists()


def test_the_worker_runs_without_xpuc_and_says_what_is_missing():
    settings = {
        "package": "llama_cpp",
        "model": "m",
        "threads": 1,
        "n_context": 8,
        "n_sequences": 1,
    }
    import subprocess

    done = subprocess.run(
        [sys.executable, "-I", peer.peer_worker.__file__, json.dumps(settings)],
        capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "error" in json.loads(done.stdout)
