"""`xpuc compile` and all that its artifact is good for, on a tiny model."""

import shutil
from itertools import pairwise

import pytest
from cli_runs import SIZES, invoke

from xpuc.cli import sources
from xpuc.cli.compile import command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(folder, checkpoint):
    done = invoke(
        "compile", checkpoint, *SIZES, "-o", folder / "m.xpuc", "--dump-ir", folder / "ir", "--json"
    )
    assert done.code == 0, done.err
    return done.json


@pytest.fixture(scope="module")
def artifact(folder, compiled):
    return folder / "m.xpuc"


def test_json_says_what_was_made(compiled, artifact, checkpoint):
    assert compiled["path"] == str(artifact)
    assert compiled["context"] == 256
    file = (artifact / "weights.safetensors").read_bytes()
    header = 8 + int.from_bytes(file[:8], "little")
    assert compiled["bytes"]["weights"] == len(file) - header
    assert compiled["bytes"]["library"] == (artifact / "model.so").stat().st_size
    assert compiled["bytes"]["artifact"] == sum(
        file.stat().st_size
        for file in artifact.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    )
    tensors = invoke("inspect", checkpoint, "--json").json["memory"]["weights"]
    assert compiled["bytes"]["source_tensors"] == tensors
    assert compiled["fusions"]["fuse_qkv"]["applied"] > 0
    assert all(o["kernels"] for o in compiled["operations"])
    assert compiled["records_ignored"] == {}
    parts = {name: value for name, value in compiled["seconds"].items() if name != "total"}
    assert compiled["seconds"]["total"] == pytest.approx(sum(parts.values()), abs=0.01)


def test_a_pass_replayed_on_a_dump_writes_the_next_dump(folder, compiled):
    dumps = sorted((folder / "ir").iterdir())
    assert dumps[0].name == "00_graph.py"
    for before, after in pairwise(dumps):
        name = after.stem.partition("_")[2]
        done = invoke("opt", before, "--pass", name)
        assert done.out == after.read_text(), name
        assert done.err.startswith(f"{name}: ")


def test_opt_writes_a_file_and_takes_several_passes(folder, compiled, tmp_path):
    first, second, third = sorted((folder / "ir").iterdir())[:3]
    names = [each.stem.partition("_")[2] for each in (second, third)]
    invoke("opt", first, "--pass", names[0], "--pass", names[1], "-o", tmp_path / "out.py")
    assert (tmp_path / "out.py").read_text() == third.read_text()


def test_an_unknown_pass_is_named_with_the_nearest(folder, compiled):
    done = invoke("opt", folder / "ir" / "00_graph.py", "--pass", "fuse_kv")
    assert done.err.splitlines()[0] == "error: unknown pass: 'fuse_kv'"
    assert "did you mean 'fuse_qkv'?" in done.err.splitlines()[1]


def test_run_score_and_tokenize_agree(artifact):
    ran = invoke(
        "run", artifact, "--raw", "-p", "Hello", "-n", 5, "--temp", 0, "--ignore-eos", "--json"
    )
    ids = ran.json["prompt_ids"] + ran.json["ids"]
    assert (
        ran.json["prompt_ids"] == invoke("tokenize", artifact, "-p", "Hello", "--json").json["ids"]
    )
    assert len(ran.json["ids"]) == 5
    scored = invoke("score", artifact, "--ids", "-", "--top", 1, "--json", stdin=str(ids)).json
    likeliest = [each["top"][0][0] for each in scored["positions"][1:]]
    assert likeliest[-5:] == ran.json["ids"]


def test_verbose_prints_the_memory_statement_and_the_chain(artifact):
    done = invoke("run", artifact, "--raw", "-p", "Hello", "-n", 1, "-v")
    assert "K/V pool" in done.err
    assert "sampler chain: logits -> ?logit-bias" in done.err


def test_explain_says_how_every_operation_runs_and_what_it_takes(artifact):
    facts = invoke("explain", artifact, "--json").json
    assert facts["not_measured"] is None
    names = [o["name"] for o in facts["operations"]]
    assert any(name.startswith("head_argmax") for name in names)
    for operation in facts["operations"]:
        assert operation["schedule"]
        assert operation["reason"]
        assert operation["measured_us"] > 0, operation["name"]
    assert sum(o["uses"] * o["measured_us"] for o in facts["operations"]) < 3 * facts["step_us"]
    assert facts["fusions"]["fuse_qkv"]["applied"] > 0
    shown = invoke("explain", artifact, "--kernel", "gate_up*", "--entry", "prefill", "-d", 20)
    assert "% of the roofline" in shown.out
    assert "linear " not in shown.out.replace("linear_", "")
    assert "because   no record" in shown.out


def test_explain_refuses_what_is_not_there(artifact, checkpoint):
    assert invoke("explain", artifact, "--entry", "x").err.startswith("error: --entry x: there is")
    assert "so\nhint: it has attention," in invoke("explain", artifact, "--kernel", "x").err
    assert "is not an artifact" in invoke("explain", checkpoint).err
    assert "the artifact is for" in invoke("explain", artifact, "--gpu", "H200").err


def test_a_context_beyond_the_compiled_one(artifact):
    done = invoke("run", artifact, "-p", "Hello", "--ctx", 512)
    assert done.code == 2
    assert done.err.splitlines()[1] == "hint: compile it again with --ctx 512"


def test_bench_measures_what_it_was_asked_for(artifact):
    rows = invoke(
        "bench", artifact, "-p", 32, "-n", 4, "-d", "0,20", "-b", "1,2", "-r", 2, "--json"
    ).json
    assert [row["test"] for row in rows] == [
        "pp32", "pp32 @ d20", "tg4", "tg4 b2", "tg4 @ d20", "tg4 b2 @ d20",
    ]  # fmt: skip
    assert all(row["tok_s"] > 0 and row["pct_bandwidth"] > 0 for row in rows)


def test_bench_refuses_what_does_not_fit(artifact):
    too_long = invoke("bench", artifact, "-p", 0, "-n", 300)
    assert "compile it again with --ctx 300" in too_long.err
    too_wide = invoke("bench", artifact, "-p", 0, "-n", 4, "-b", 4)
    assert "compile it again with --max-batch 4" in too_wide.err


def test_every_byte_of_it_is_verified(artifact):
    assert invoke("inspect", artifact, "--verify").code == 0


def test_a_checkpoint_runs_from_the_cache(artifact, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("XPUC_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "_compile", lambda path, to, ctx: shutil.copytree(artifact, to))
    args = ("--raw", "-p", "Hello", "-n", 3, "--temp", 0, "--json")
    assert (
        invoke("run", checkpoint, *args).json["ids"] == invoke("run", artifact, *args).json["ids"]
    )


def test_a_broken_checkpoint_leaves_nothing_behind(tmp_path, checkpoint):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(checkpoint.read_bytes()[:-100])
    done = invoke("compile", broken)
    assert done.code == 2
    assert done.err.startswith(f"error: {broken}: ")
    assert len(done.err.splitlines()) == 2
    assert list(tmp_path.iterdir()) == [broken]


def test_something_else_is_not_overwritten(tmp_path, checkpoint):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    done = invoke("compile", checkpoint, "-o", tmp_path / "out")
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path / 'out'}: exists and is not an xpuc artifact")
    assert (tmp_path / "out" / "precious").exists()


@pytest.mark.parametrize(
    "line", ["--no-fuse fuse_qk", "--block-tokens 20", "--max-batch 0", "--max-chunk 5", "--ctx -1"]
)
def test_options_are_refused_before_any_work(tmp_path, checkpoint, line):
    done = invoke("compile", checkpoint, *line.split(), "-o", tmp_path / "m.xpuc")
    assert done.code == 2
    assert len(done.err.splitlines()) == 2
    assert not (tmp_path / "m.xpuc").exists()


def test_the_defaults_are_those_of_the_compiler():
    from xpuc.codegen.compile import Options

    told = command.make_context("compile", ["m.gguf"]).params
    assert {name: told[name] for name in vars(Options())} == vars(Options())
